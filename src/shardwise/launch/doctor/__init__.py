"""The work of ``shardwise doctor``: it describes the machine (``machine``), measures it on the ranks that ``train``
would start (``ranks``: ``compute`` and ``links`` by the ``clock``), and says what is below what the hardware should
give (``verdict``)."""

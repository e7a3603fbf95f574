"""The words of a run to its user: the header it begins with, the text it writes, the report it ends with. Where one of
them fails, the run goes on with a warning (warn)."""

"""Checkpoints: saving and resuming (save), how one becomes visible whole or not at all (commit), what a directory says
about itself (manifest), how tensors lie in files (storage), which ones are there (locate), which stay (retention), what
a user's own loop keeps besides (stateful), and the ranks' own gloo group (group)."""

"""Run folders, checkpoints and averages. Knows pytrees only: neither models nor optimizers.

`run_folder.RunFolder` says where everything of a run lies and who may write it; `store.Store` saves and restores
training state; `average` makes one model of several snapshots.
"""

"""Planning: what a config will need on a mesh, before it runs; by arithmetic, or by the word of the TPU's compiler."""

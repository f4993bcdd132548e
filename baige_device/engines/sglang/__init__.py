"""The mount into SGLang: an out-of-tree platform when one is ours to provide, a general plugin otherwise."""

"""The Kunlun (P800) backend: vendor kernels through `torch_xmlir`, `kunlun_ops` and `xspeedgate_ops`."""

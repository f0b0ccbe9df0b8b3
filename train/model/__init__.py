"""ZAYA1 (arXiv 2511.17127, 2510.04476, 2605.05365): compressed convolutional attention and routed experts.

`zaya.py` reads top-down; each other file holds one of its parts. Tensor names end in the letters of their
dimensions:

    B sequences of a microbatch    H query heads             L layers
    S tokens of a sequence         J key and value heads     E experts
    T tokens of a microbatch, B*S  G query heads per J       C router classes, E or E + 1 (skip)
    D hidden size                  P channels of a head      K classes each token is sent to
    V vocabulary                   Q channels of q and k     N rows sent to classes, T*K
    R router's hidden size         A channels that rotate    F expert's hidden size

Parameters have one format (fp32, bf16, or fp64 in tests). Whatever it is, these run in at least fp32:
the residual stream and its scaling, RMSNorm, q/k mean, q/k norm and rotation, router softmax, head and loss
(arXiv 2605.05365, IV-D).
"""

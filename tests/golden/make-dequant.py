#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes dequant.txt: blocks of every weight type and the floats that the `gguf` package
(PyPI, gguf.quants.dequantize) gives for them. Run: python3 make-dequant.py > dequant.txt

One line a case: type, the blocks' bytes in hex, the floats in hex (little endian)."""
import numpy as np
import gguf
from gguf.quants import dequantize

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# where each type keeps its F16 factors
FACTORS = {"F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
           "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
rng = np.random.default_rng(20240229)

print("# made by make-dequant.py with the gguf package")
for name in TYPES:
    qtype = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    # small, subnormal, largest, zero and negative factors
    for factors in ([0.0123, -0.5], [5.96e-8, 6.0e-5], [65504.0, -65504.0], [0.0, 1.0], [-3.1e-3, 7.7e-3]):
        n = 1 if block > 1 else 32
        raw = rng.integers(0, 256, (n, size), dtype=np.uint8)
        if name == "F32":
            raw = (rng.standard_normal(n) * 10.0 ** rng.integers(-30, 30, n)).astype("<f4").view(np.uint8).reshape(n, 4)
        elif name == "BF16":
            raw[:, 1] &= 0xBF
        elif name == "F16":
            raw[:, 1] &= 0xBB
        for i, at in enumerate(FACTORS.get(name, [])):
            if name == "F16":
                raw[i] = np.array([factors[i]], "<f2").view(np.uint8)
                continue
            raw[:, at:at + 2] = np.array([factors[i]], "<f2").view(np.uint8)
        flat = raw.reshape(-1)
        out = flat.view("<f4") if name == "F32" else dequantize(flat.view("<f2") if name == "F16" else flat, qtype)
        print(name, flat.tobytes().hex(), np.asarray(out, "<f4").reshape(-1).tobytes().hex())

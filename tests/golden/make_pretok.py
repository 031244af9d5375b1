#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes tests/golden/pretok.jsonl and bpe.json with the `tokenizers` package (pip install tokenizers).

pretok.jsonl: {"pre", "text", "cuts"}: where each pre-tokenizer, given as its published regular
expression, cuts a text; cuts are the pieces' lengths in bytes of UTF-8.
bpe.json: a small vocabulary with its merges, trained here, and texts with their ids for each
pre-tokenizer. Token "Ġunmergeable" is in the vocabulary but no merge gives it.
usage: make_pretok.py FOLDER
"""
import json, random, sys
from tokenizers import Regex, Tokenizer, models, pre_tokenizers as P, trainers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def split(pattern):
    return P.Split(Regex(pattern), "isolated")


PRE = {
    "gpt-2": split(GPT2),
    "smollm": P.Sequence([P.Digits(individual_digits=True), split(GPT2)]),
    "llama-bpe": split(LLAMA3),
    "qwen2": split(QWEN2),
}

TEXTS = [
    "", " ", "  ", "a", " a", "  a", "\n", "\n\n", " \n", "\n ", " \n ", "\r\n", "\r\n\r\n x", "\t", "\tx", " \tx", "x \n\n y",
    "I'm you're we'll they've he'd it's don't", "I'M YOU'RE WE'LL THEY'VE HE'D IT'S DON'T", "'tis 'Twas ''quoted''",
    "a'\u017fx '\u017f", "'s't're've'm'll'd", "'S'T'RE'VE'M'LL'D", "x'", "'", "''", " 's", " 'll", "'lL'Ll", "o'clock o'l o'r o'v",
    "1", "12", "123", "1234", "12345", "123456", "1234567", " 1", "  12", " 1234", "1 2 3", "3.14159", "1,000,000", "0x1F600", "1st 2nd",
    "x1y22z333", "\u0661\u0662\u0663\u0664", "\u0967\u0968\u0969\u096a", "\u00bd\u00be\u00b2\u00b3", "\u2160\u2161\u2162\u2163\u2164", "\u2460\u2461\u2462\u2463",
    " \u0661\u0662\u0663\u0664 5", "\u4e00\u4e8c\u4e09\u3007", "\U0001d7ce\U0001d7cf\U0001d7d0\U0001d7d1",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c", "\uc548\ub155 \uc138\uacc4", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "\u05e9\u05dc\u05d5\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "e\u0301te\u0301", "A\u030a", " \u0301x", "\u0301", "x\u0301\u0301y",
    "\U0001f600", " \U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7", "a\U0001f600b 1\U0001f6002", "\u2764\ufe0f",
    "\u00a0x", "\u00a0\u00a0x", "x\u00a0", "\u2003x\u2003\u2003y", "\u3000x", "\u2028x\u2029", "\u0085x", "\u1680x", "\u200bx", "\ufeffx", "\u180ex", "\u202fx", "\u205fx",
    "x\u001cy\u001d \u001f", "\u000bx\u000c", "\u0000", "a\u0000b", " \u0000 ", "\u007fx",
    "foo(bar);\n", "foo(bar);\r\n\r\n  baz", "!!!\n\n\n", " !!!\n", "!\r", "! \n", "...\nx", "a.b", " .b", ".b", "-x", "--x", "(x)", " (x)", "\t(x)",
    "  (x)", "$x", "#x y", "@x", "_x", "__x__", "/usr/bin", "http://a.b/c?d=e&f=1", "user@example.com", "a_b-c", "{\"a\": [1, 2.5]}",
    "    indented\n\tTabbed\n        deep\n", "trailing   ", "   leading", "a  b   c    d", "x\n  y\n    z", "x \n  \n  y", "  \n\n  x", "\n\n\nx\n\n", " \r\n \r x",
    "ALLCAPS camelCase snake_case", "na\u00efve caf\u00e9", "Gr\u00f6\u00dfe", "\u01c5\u02b0\u00aa\u00ba", "\u2167 \u216f", "\ufb01x", "\u212ax", "\u0149x",
    "\U00010400\U00010428", "\U000e0001x", "\ue000x", "\ufffd\ufffd x", "<|im_start|>user\n", "x<|endoftext|>", "a\u2581b",
    " 5", "   5", "   5 6", " \n5", "5   ", "5\n\n5", "x  5", "\u00a05", "\t\t5", "5'5", "5's", " 5's",
]
ALPHABET = list("aZs'tlmdrev019 .,!-_(\n\r\t") + [
    " ", " ", "'", "\n", "\r\n", "\u00a0", "\u3000", "\u0085", "\u2028", "\u00e9", "\u0301", "\u017f", "\u4e2d", "\u3042", "\u0661", "\u00bd", "\u2167", "\u0967",
    "\U0001f600", "\u200d", "\ufe0f", "\u200b", "\u0000", "\u001c", "\u20ac", "\u01c5", "\u02b0", "\u05d0", "\u0e01", "\u0e31", "\U0001d7ce", "\ue000"]


def random_texts(rng):
    for _ in range(250):
        yield "".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 24)))
    for _ in range(40):  # any characters of the basic plane that have been assigned for long
        yield "".join(chr(c) for c in (rng.randrange(0xa0, 0x3100) for _ in range(12)))


TRAIN = ["the quick brown fox jumps over the lazy dog and the other thing there then", "I'm sure you're there, don't they've it's",
         "numbers 123 456 7890 12 2024", "for (int i = 0; i < n; i++) {\n    return x;\n}\n\n", "caf\u00e9 \u4f60\u597d\u4e16\u754c \U0001f600\U0001f601", "aaaa bbbb aaaa     spaces\n\n\n"]


def trained():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = P.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(P.ByteLevel.alphabet())
    tok.train_from_iterator(TRAIN * 3, trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, min_frequency=2, show_progress=False))
    model = json.loads(tok.to_str())["model"]
    vocab = dict(model["vocab"])
    vocab["\u0120unmergeable"] = len(vocab)
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    return vocab, merges


def main(folder):
    rng = random.Random(20)
    texts = list(dict.fromkeys(TEXTS + list(random_texts(rng))))
    with open(f"{folder}/pretok.jsonl", "w") as out:
        for name, pre in PRE.items():
            for t in texts:
                cuts = [len(piece.encode()) for piece, _ in pre.pre_tokenize_str(t)]
                out.write(json.dumps({"pre": name, "text": t, "cuts": cuts}) + "\n")
    vocab, merges = trained()
    lines = []
    for name, pre in PRE.items():
        tok = Tokenizer(models.BPE(vocab, merges, ignore_merges=name == "llama-bpe"))
        tok.pre_tokenizer = P.Sequence([pre, P.ByteLevel(add_prefix_space=False, use_regex=False)])
        for t in TEXTS + TRAIN + ["x unmergeable y", "unmergeable", " unmergeable", "a" * 100, "ab" * 60, "the" * 40, " " * 70 + "x"]:
            lines.append({"pre": name, "text": t, "ids": tok.encode(t).ids})
    with open(f"{folder}/bpe.json", "w") as out:
        tokens = sorted(vocab, key=vocab.get)
        out.write('{"tokens": %s,\n"merges": %s,\n"lines": [\n' % (json.dumps(tokens), json.dumps([" ".join(m) for m in merges])))
        out.write(",\n".join(map(json.dumps, lines)) + "\n]}\n")


main(sys.argv[1])

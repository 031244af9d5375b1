# SPDX-License-Identifier: MIT
"""Checks a running aprd with apr_client.py: test_client.py SOCKET."""

import errno
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import apr_client  # noqa: E402
from apr_client import AprError, Client  # noqa: E402

TEXT = "The cat sat; two dogs ran. 123"
CHECKS = []


def check(function):
    """Enter a function among the checks."""
    CHECKS.append(function)
    return function


def equal(got, wanted):
    """Fail unless both are the same."""
    if got != wanted:
        raise AssertionError("%r instead of %r" % (got, wanted))


def true(value, what):
    """Fail unless it holds."""
    if not value:
        raise AssertionError(what)


def fails(number, pos, call):
    """Fail unless the call is refused with this number and offset."""
    try:
        call()
    except AprError as e:
        equal((errno.errorcode[e.errno], e.pos),
              (errno.errorcode[number], pos))
        true(e.strerror, "no reason given")
        return
    raise AssertionError("not refused")


@check
def ping(client):
    """NOP is acknowledged."""
    for _ in range(200):
        true(client.ping().waited_ns >= 0, "no time")


@check
def models(client):
    """The list has the default model."""
    rows = client.models()
    equal(len(rows), client.n_models)
    equal([row.id for row in rows if row.default], [client.default_model])
    true(all(row.n_ctx and row.n_vocab and row.name for row in rows), rows)


@check
def status(client):
    """The status knows this session."""
    rows = client.status()["session_rows"]
    mine = [row for row in rows if row["session"] == client.session]
    equal([row["name"] for row in mine], ["test_client.py"])


@check
def vocabulary(client):
    """The pieces of the ids make up the text."""
    pieces = client.vocab(client.default_model)
    equal(len(pieces), client.models()[0].n_vocab)
    ids = client.tokenize(TEXT)
    true(all(0 <= i < len(pieces) and pieces[i][0] for i in ids), ids)


@check
def round_trip(client):
    """Tokenized text comes back as it was."""
    for text in (TEXT, "", "caf\u00e9 \u20ac \U0001f600", TEXT * 300):
        ids = client.tokenize(text)
        back = client.detokenize(ids).decode()
        # A vocabulary may put a space before the first word.
        equal(back[1:] if back[:1] == " " else back, text)


@check
def same_seed(client):
    """The same seed gives the same answer."""
    answers = []
    for _ in range(2):
        stream = client.generate(TEXT, max_tokens=12, seed=1234,
                                 temperature=0.9, top_k=40, ignore_eos=1)
        answers.append([(t.id, t.text, t.logprob) for t in stream])
        equal((stream.final.why, stream.final.generated), ("length", 12))
    equal(answers[0], answers[1])
    true(len(answers[0]) >= 12, answers[0])


@check
def streaming(client):
    """Tokens come one by one, in order, with their best rivals."""
    stream = client.generate(TEXT, max_tokens=8, temperature=0.0, logprobs=3,
                             ignore_eos=1)
    tokens = [token for token in stream if token.id is not None]
    equal([token.pos for token in tokens], list(range(8)))
    for token in tokens:
        equal(len(token.top), 3)
        equal(token.top, sorted(token.top, key=lambda t: -t[1]))
        equal(token.top[0], (token.id, token.logprob))
    true(stream.final.prompt > 0, stream.final)


@check
def stop_string(client):
    """The answer ends before a stop string."""
    options = dict(max_tokens=24, seed=5, temperature=0.0, ignore_eos=1)
    whole = client.generate(TEXT, **options).text()
    # A random model's bytes are often no UTF-8: U+FFFD stands for these.
    every = [whole[i:i + 3] for i in range(4, len(whole) - 2)]
    parts = [part for part in every if "\ufffd" not in part]
    stop = parts[len(parts) // 2]
    stream = client.generate(TEXT, stop=["\x01never\x02", stop], **options)
    equal(stream.text(), whole[:whole.index(stop)])
    equal(stream.final.why, "stop string")


@check
def cancel(client):
    """A stream that is cancelled midway ends, and the session goes on."""
    stream = client.generate(TEXT, max_tokens=0xffffffff, ignore_eos=1)
    next(stream)
    true(stream.cancel(), "it had ended")
    fails(errno.ECANCELED, 0, stream.text)
    equal(stream.final.why, "cancelled")
    true(not stream.cancel(), "cancelled twice")
    client.ping()


@check
def cancel_all(client):
    """The frame CANCEL_ALL ends every stream."""
    streams = [client.generate(TEXT, max_tokens=0xffffffff, ignore_eos=1)
               for _ in range(3)]
    for stream in streams:
        next(stream)
    client.cancel_all()
    for stream in streams:
        fails(errno.ECANCELED, 0, stream.text)


@check
def timeout(client):
    """A request's time limit ends it: when it is over, or before, where it
    is known that the first token cannot come in time."""
    stream = client.generate(TEXT, max_tokens=0xffffffff, timeout_ms=1,
                             ignore_eos=1)
    try:
        stream.text()
    except AprError as e:
        true(e.errno in (errno.ETIMEDOUT, errno.ETIME), "another errno")
        true(e.strerror, "no reason given")
        return
    raise AssertionError("no time limit")


@check
def score(client):
    """Every id but the first has a log-probability, always the same."""
    ids = client.tokenize(TEXT)
    scores = client.score(ids, logprobs=2)
    equal([s.pos for s in scores], list(range(1, len(ids))))
    equal([s.id for s in scores], ids[1:])
    for s in scores:
        equal(len(s.top), 2)
        true(s.logprob <= s.top[0][1] <= 0, s)
    equal([s.logprob for s in client.score(ids)], [s.logprob for s in scores])


@check
def many_at_once(client):
    """More requests than there are credits and slots all end."""
    with Client(client.path, "small", sq_entries=2, cq_entries=8) as small:
        ids = client.tokenize(TEXT)
        requests = [small.submit(apr_client.TOKENIZE, TEXT.encode())
                    for _ in range(200)]
        for request in requests:
            data = b"".join(e.blobs.get(apr_client.BLOB_IDS, b"")
                            for e in request)
            request.finish()
            equal(apr_client.unpack_ids(data), ids)


@check
def bad_flag(client):
    """An unknown flag is refused; pos is the offset of flags."""
    fails(errno.EINVAL, 2, client.submit(
        apr_client.TOKENIZE, b"x", flags=0x8000).finish)
    fails(errno.EINVAL, 2, client.submit(
        apr_client.TOKENIZE, b"x", flags=apr_client.NO_STREAM).finish)


@check
def bad_parameter(client):
    """A bad parameter is refused; pos is 64 and its offset in the list."""
    fails(errno.EINVAL, 64 + 8 + 4, client.generate(
        "x", temperature=-1.0).text)


@check
def bad_model(client):
    """An unknown model is refused; pos is the offset of model."""
    fails(errno.ENOENT, 4, client.submit(
        apr_client.TOKENIZE, b"x", model=0x7fffffff).finish)


@check
def refused_hello(client):
    """A feature that nobody has is refused by WELCOME."""
    fails(errno.EOPNOTSUPP, 0, lambda: Client(client.path, need=1 << 63))


def main(path):
    """Run all checks; 0 if none failed."""
    failed = 0
    for function in CHECKS:
        try:
            with Client(path, "test_client.py") as client:
                function(client)
            print("ok     %s" % function.__name__)
        except Exception as e:  # a check may fail in any way
            failed += 1
            print("FAILED %s: %s: %s" % (
                function.__name__, type(e).__name__, e))
    print("%d passed, %d failed" % (len(CHECKS) - failed, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: test_client.py SOCKET")
    sys.exit(main(sys.argv[1]))

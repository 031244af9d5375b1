# SPDX-License-Identifier: MIT
"""A client of aprd in Python's standard library, after aprd-protocol(7)."""

import array
import collections
import errno
import fcntl
import json
import mmap
import os
import platform
import select
import socket
import struct
import sys

# Frames.
FRAME = struct.Struct("<IHHIi")
FRAME_MAGIC = 0x31525041
FRAME_MAX = 32768
FD_BODY = 1
HELLO, WELCOME, READY, GET_MODELS, GET_VOCAB = 1, 2, 3, 4, 5
NOTIFY, MODEL_CHANGED, BYE, CANCEL_ALL, STATUS = 7, 8, 9, 10, 11
HELLO_BODY = struct.Struct("<HHIQQIIIIHHIQQ32s16x")
WELCOME_BODY = struct.Struct("<HHIQQQ8I8s2QII16x")
MODEL_ROW = struct.Struct("<IIII32s16s64s")
VOCAB_HEAD = struct.Struct("<8sIIIIII")
RING_ALWAYS = 1

# Regions, as indexes of 32-bit words.
SQ_TAIL, CQ_HEAD, WAIT_HOW = 0x000 // 4, 0x080 // 4, 0x108 // 4
CQ_TAIL, SQ_HEAD = 0x080 // 4, 0x100 // 4
FLAGS, REASON = 0x180 // 4, 0x184 // 4
RESULT_HEAD = struct.Struct("<8sHHIQQ14I")
SOCKET_ALWAYS = 3
DEAD = 8
REASONS = ("none", "shutdown", "restart", "the client broke a rule",
           "memory could not be read", "quota", "an administrator")
SEALS_REQUEST, SEALS_RESULT, SEALS_BODY = 0x7, 0x17, 0xf
F_GET_SEALS = 1034

# Submissions.
SQE = struct.Struct("<BBHIQIIIIQIIHBBIQ")
(NOP, GENERATE, CHAT, SCORE, TOKENIZE, DETOKENIZE, EMBED, CANCEL,
 FREE) = range(9)
NO_STREAM, REPLAYABLE, PARSE_SPECIAL = 1, 2, 4
KEEP, FORCED, ADD_BOS = 8, 16, 32
FMT_TEXT, FMT_IDS = 0, 1
PAR_SAMPLING, PAR_LOGPROBS, PAR_BIAS, PAR_STOP, PAR_STOP_IDS = 1, 2, 3, 4, 5
SAMPLING_FIELDS = (
    ("temperature", "f"), ("top_k", "i"), ("top_p", "f"), ("min_p", "f"),
    ("repeat_penalty", "f"), ("frequency_penalty", "f"),
    ("presence_penalty", "f"), ("penalty_window", "i"), ("ignore_eos", "I"))

# Completions.
CQE = struct.Struct("<QiHBBIfHHI32s")
MORE, BLOB = 1, 2
TOKEN, PIECE, DATA, SAMPLE_END, FINAL, ACK = 1, 2, 3, 4, 5, 6
BLOB_TEXT, BLOB_TOP, BLOB_IDS, BLOB_ERROR, BLOB_SCORES, BLOB_EMBED, BLOB_LIST \
    = range(1, 8)
WHY = ("none", "stop", "stop string", "length", "cancelled", "timeout",
       "numeric", "drained", "error")

M32 = 0xffffffff

Model = collections.namedtuple(
    "Model", "id default n_ctx n_vocab weights_hash receipt name")
Entry = collections.namedtuple(
    "Entry", "user_data res flags type pos logprob sample aux tail text blobs")
Token = collections.namedtuple("Token", "id data text pos logprob top sample")
Final = collections.namedtuple(
    "Final", "why backend route queue_us prefill_us decode_us prompt cached "
    "generated handle")
Score = collections.namedtuple("Score", "pos id logprob top")
Pong = collections.namedtuple("Pong", "waited_ns served_ns")


class AprError(OSError):
    """A refusal by the daemon, with the culprit's offset where it says one."""

    def __init__(self, number, text="", pos=0):
        super().__init__(number, text or os.strerror(number))
        self.pos = pos


def socket_path(path=None):
    """The socket's path: the one given, else where the daemon usually is."""
    if path:
        return path
    if os.environ.get("APRD_SOCKET"):
        return os.environ["APRD_SOCKET"]
    run = os.environ.get("XDG_RUNTIME_DIR")
    if run and os.path.exists(run + "/aprd/aprd.sock"):
        return run + "/aprd/aprd.sock"
    return "/run/aprd/aprd.sock"


def pad(data, to):
    """The bytes with zeros up to a multiple of `to`."""
    return data + bytes(-len(data) % to)


def param(kind, data):
    """One entry of a parameter list."""
    return struct.pack("<HHI", kind, 0, len(data)) + pad(data, 8)


def sampling(**given):
    """The 40 bytes of SAMPLING from its fields by name."""
    bits, values = 0, []
    for i, (name, kind) in enumerate(SAMPLING_FIELDS):
        value = given.pop(name, None)
        if value is not None:
            bits |= 1 << i
        values.append(struct.pack("<" + kind, value or 0))
    if given:
        raise TypeError("no sampling field %s" % ", ".join(sorted(given)))
    return struct.pack("<I", bits) + b"".join(values)


def parameters(stop=(), stop_ids=(), bias=None, logprobs=None, **fields):
    """A parameter list from keyword arguments."""
    out = b""
    if fields:
        out += param(PAR_SAMPLING, sampling(**fields))
    if logprobs is not None:
        out += param(PAR_LOGPROBS, struct.pack("<I", logprobs))
    if bias:
        out += param(PAR_BIAS, b"".join(
            struct.pack("<If", i, value) for i, value in bias.items()))
    if isinstance(stop, (str, bytes)):
        stop = (stop,)
    if stop:
        strings = [s.encode() if isinstance(s, str) else s for s in stop]
        out += param(PAR_STOP, b"".join(
            struct.pack("<I", len(s)) + pad(s, 4) for s in strings))
    if stop_ids:
        out += param(PAR_STOP_IDS, pack_ids(stop_ids))
    return out


def pack_ids(ids):
    """Token ids as bytes."""
    ids = list(ids)
    return struct.pack("<%dI" % len(ids), *ids)


def unpack_ids(data):
    """Token ids of bytes."""
    return list(struct.unpack("<%dI" % (len(data) // 4), data))


def unpack_top(data):
    """The (id, logprob) pairs of a TOP blob."""
    return list(struct.iter_unpack("<If", data))


def unpack_scores(data):
    """The records of a SCORES blob."""
    at, out = 0, []
    while at < len(data):
        pos, token, logprob, k = struct.unpack_from("<IIfI", data, at)
        at += 16
        out.append(Score(pos, token, logprob, unpack_top(data[at:at + 8 * k])))
        at += 8 * k
    return out


def unpack_blob(data):
    """The {format: bytes} of one blob, of every part if it is a LIST."""
    size, fmt, _ = struct.unpack_from("<IHH", data)
    if size > len(data) - 8:
        raise AprError(errno.EPROTO, "a blob goes beyond its place")
    body = data[8:8 + size]
    if fmt != BLOB_LIST:
        return {fmt: body}
    parts, at = {}, 0
    while at < len(body):
        parts.update(unpack_blob(body[at:]))
        at += 8 + (struct.unpack_from("<I", body, at)[0] + 7) // 8 * 8
    return parts


class Request:
    """A submitted request; iterating gives its entries up to the last one."""

    def __init__(self, client, user_data):
        self.client = client
        self.user_data = user_data
        self.entries = collections.deque()
        self.last = None

    def __iter__(self):
        return self

    def __next__(self):
        while not self.entries:
            if self.last:
                raise StopIteration
            self.client.wait()
        return self.entries.popleft()

    def finish(self):
        """Wait for the last entry; raise if the request failed."""
        while not self.last:
            self.client.wait()
        return self.check()

    def check(self):
        """The last entry, or the failure that it tells of."""
        if self.last.res < 0:
            text = self.last.blobs.get(BLOB_ERROR, b"").decode()
            raise AprError(-self.last.res, text, self.last.pos)
        return self.last

    def cancel(self):
        """Cancel; false if it had ended before."""
        return self.client.cancel(self.user_data)


class Stream(Request):
    """A GENERATE; iterating gives Token for each piece of the answer."""

    def __next__(self):
        while True:
            try:
                entry = super().__next__()
            except StopIteration:
                self.check()
                raise
            if entry.type not in (TOKEN, PIECE):
                continue
            top = entry.blobs.get(BLOB_TOP)
            return Token(entry.res if entry.type == TOKEN else None,
                         entry.text, entry.text.decode(errors="replace"),
                         entry.pos, entry.logprob,
                         unpack_top(top) if top else [], entry.sample)

    def text(self):
        """The rest of the answer in one string."""
        return b"".join(token.data for token in self).decode(errors="replace")

    @property
    def final(self):
        """What the FINAL entry carries, None before it came."""
        if not self.last:
            return None
        aux = self.last.aux
        return Final(WHY[aux & 0xff] if aux & 0xff < len(WHY) else "?",
                     aux >> 8 & 7, aux >> 11 & 15,
                     *struct.unpack("<6IQ", self.last.tail))

    def close(self):
        """Cancel if it has not ended, and drop what is left of it."""
        if not self.last:
            self.cancel()
        self.entries.clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Client:
    """A session with aprd."""

    def __init__(self, path=None, name="apr_client.py", need=0, want=0,
                 sq_entries=0, cq_entries=0, req_size=0, res_size=0):
        if sys.byteorder != "little" or \
                platform.machine() not in ("x86_64", "AMD64", "i686"):
            raise NotImplementedError("this needs the memory order of x86")
        self.path = socket_path(path)
        self.requests = {}
        self.next_id = 1
        self.in_flight = 0
        self.models_changed = False
        self.bye = None
        self.hung_up = False
        self.doorbell = -1
        self.maps, self.views = [], []
        self.sock = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self.sock.connect(self.path)
            self._check_peer()
            self._hello(HELLO_BODY.pack(
                0, 1, RING_ALWAYS, need, want, sq_entries, cq_entries,
                req_size, res_size, 0, 0, 0, 0, 0, name.encode()[:31]))
        except BaseException:
            self.close()
            raise

    # Connecting.

    def _check_peer(self):
        """Refuse a daemon of a user that is not to be trusted."""
        cred = self.sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        uid = struct.unpack("3i", cred)[1]
        folder = os.path.dirname(os.path.abspath(self.path))
        if uid not in (0, os.getuid(), os.stat(folder).st_uid):
            raise AprError(errno.EPERM, "the daemon is that of uid %d" % uid)

    def _hello(self, body):
        """Exchange HELLO and WELCOME, map the regions, send READY."""
        self._send(HELLO, body)
        kind, _, err, body, fds = self._receive(None)
        try:
            if err:
                raise AprError(abs(err), body.decode(errors="replace"))
            if kind != WELCOME or len(body) < WELCOME_BODY.size:
                raise AprError(errno.EPROTO, "no WELCOME")
            f = WELCOME_BODY.unpack_from(body)
            if f[0] != 0:
                raise AprError(errno.EPROTONOSUPPORT, "version %d.%d" % f[:2])
            (_, _, _, self.features, self.epoch, self.session, req_size,
             res_size, self.max_inflight, self.max_input, self.max_blob,
             self.default_model, self.n_models, self.models_gen, kinds,
             low, high, self.poll_us, self.spin_us) = f
            self.opcodes = low | high << 64
            named = dict(zip((k for k in kinds if k), fds))
            if not all(k in named for k in (1, 2, 3)):
                raise AprError(errno.EPROTO, "descriptors are missing")
            self._map(named[1], req_size, SEALS_REQUEST, False)
            self._map(named[2], res_size, SEALS_RESULT, True)
            self.doorbell = named[3]
            fds.remove(self.doorbell)
            os.set_blocking(self.doorbell, False)
        finally:
            for fd in fds:
                os.close(fd)
        self.req, self.req_words, self.res, self.res_words = self.views
        self._geometry()
        self.req_words[WAIT_HOW] = SOCKET_ALWAYS
        self._send(READY)

    def _map(self, fd, size, seals, read_only):
        """Check one region's seals and size and map it."""
        if fcntl.fcntl(fd, F_GET_SEALS) & seals != seals:
            raise AprError(errno.EPROTO, "a region is not sealed")
        if os.fstat(fd).st_size != size:
            raise AprError(errno.EPROTO, "a region has not the size it should")
        prot = mmap.PROT_READ | (0 if read_only else mmap.PROT_WRITE)
        self.maps.append(mmap.mmap(fd, size, mmap.MAP_SHARED, prot))
        self.views.append(memoryview(self.maps[-1]))
        self.views.append(self.views[-1].cast("I"))

    def _geometry(self):
        """Read the result region's header."""
        (magic, major, _, _, epoch, session, self.sq_entries, self.sqe_size,
         self.sq_off, self.cq_entries, self.cqe_size, self.cq_off, self.arena,
         self.arena_len, _, _, self.max_inflight, _, _, _) \
            = RESULT_HEAD.unpack_from(self.res)
        if magic != b"ARGION01" or major != 0 or \
                (epoch, session) != (self.epoch, self.session):
            raise AprError(errno.EPROTO, "the result region is not one")
        if self.sq_off + self.sq_entries * self.sqe_size > len(self.req) or \
                self.cq_off + self.cq_entries * self.cqe_size > len(self.res) \
                or self.arena + self.arena_len > len(self.req):
            raise AprError(errno.EPROTO, "the geometry does not fit")
        self.sq_tail = self.req_words[SQ_TAIL]
        self.cq_head = self.req_words[CQ_HEAD]
        self.arena_used = 0

    def close(self):
        """End the session."""
        for view in reversed(self.views):
            view.release()
        for region in self.maps:
            region.close()
        self.maps, self.views = [], []
        if self.doorbell >= 0:
            os.close(self.doorbell)
            self.doorbell = -1
        self.sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # Frames.

    def _send(self, kind, body=b""):
        """Send one frame."""
        head = FRAME.pack(FRAME_MAGIC, kind, 0, FRAME.size + len(body), 0)
        self.sock.sendall(head + body, socket.MSG_NOSIGNAL)

    def _receive(self, timeout):
        """One frame (type, flags, err, body, descriptors), None if none."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            return None
        fds = array.array("i")
        data, extra, flags, _ = self.sock.recvmsg(
            FRAME_MAX, socket.CMSG_SPACE(3 * fds.itemsize),
            socket.MSG_CMSG_CLOEXEC)
        for level, kind, value in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(value[:len(value) // 4 * 4])
        fds = list(fds)
        if not data:
            self.hung_up = True
            raise AprError(errno.ECONNRESET, "the daemon hung up")
        magic, kind, bits, size, err = FRAME.unpack_from(data.ljust(16, b"\0"))
        if magic != FRAME_MAGIC or size != len(data) or \
                flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            for fd in fds:
                os.close(fd)
            raise AprError(errno.EPROTO, "a frame is not one")
        body = data[FRAME.size:]
        if bits & FD_BODY:
            body = self._fd_body(fds)
        return kind, bits, err, body, fds

    @staticmethod
    def _fd_body(fds):
        """Read the body that came in a descriptor."""
        fd = fds.pop(0)
        try:
            if fcntl.fcntl(fd, F_GET_SEALS) & SEALS_BODY != SEALS_BODY:
                raise AprError(errno.EPROTO, "a body is not sealed")
            out, size = b"", os.fstat(fd).st_size
            while len(out) < size:
                part = os.pread(fd, size - len(out), len(out))
                if not part:
                    raise AprError(errno.EPROTO, "a body ends early")
                out += part
            return out
        finally:
            os.close(fd)

    def _aside(self, frame):
        """Look at a frame that is no answer."""
        kind, _, err, body, fds = frame
        for fd in fds:
            os.close(fd)
        if kind == BYE:
            self.bye = (err, body.decode(errors="replace"))
        elif kind == MODEL_CHANGED:
            self.models_changed = True

    def _ask(self, kind, body=b""):
        """Send a question and return the body of its answer."""
        self._send(kind, body)
        while True:
            frame = self._receive(None)
            if frame[0] != kind:
                self._aside(frame)
                continue
            for fd in frame[4]:
                os.close(fd)
            if frame[2]:
                raise AprError(abs(frame[2]),
                               frame[3].decode(errors="replace"))
            return frame[3]

    def models(self):
        """The models that are served."""
        rows = []
        for row in MODEL_ROW.iter_unpack(self._ask(GET_MODELS)):
            rows.append(Model(row[0], bool(row[1] & 1), *row[2:6],
                              row[6].split(b"\0")[0].decode()))
        self.models_changed = False
        return rows

    def vocab(self, model=0):
        """Every token's bytes and type, as (bytes, int) by id."""
        body = self._ask(GET_VOCAB, struct.pack("<I", model))
        magic, _, n, offsets, kinds, at, size = VOCAB_HEAD.unpack_from(body)
        if magic != b"APRVOCAB":
            raise AprError(errno.EPROTO, "no vocabulary")
        ends = struct.unpack_from("<%dI" % (n + 1), body, offsets)
        pieces = body[at:at + size]
        return [(pieces[ends[i]:ends[i + 1]], body[kinds + i])
                for i in range(n)]

    def status(self):
        """The daemon's state as it tells this client."""
        return json.loads(self._ask(STATUS).decode())

    def cancel_all(self):
        """Cancel all that the daemon has taken of this session."""
        self._send(CANCEL_ALL)

    # The rings.

    def _ring(self):
        """Ring the doorbell."""
        try:
            os.write(self.doorbell, struct.pack("<Q", 1))
        except BlockingIOError:
            pass

    def _untaken(self):
        """Submitted entries that the daemon has not copied yet."""
        return (self.sq_tail - self.res_words[SQ_HEAD]) & M32

    def _place(self, data):
        """Put bytes in the arena, 8-aligned; their offset in the region."""
        size = (len(data) + 7) // 8 * 8
        if size > self.arena_len:
            raise AprError(errno.E2BIG, "larger than the arena")
        if not self._untaken():
            self.arena_used = 0
        while self.arena_used + size > self.arena_len:
            self.wait()
            if not self._untaken():
                self.arena_used = 0
        at = self.arena + self.arena_used
        self.arena_used += size
        self.req[at:at + len(data)] = data
        return at

    def submit(self, op, data=b"", params=b"", model=0, flags=0, arg=0,
               max_tokens=0, timeout_ms=0, n=0, fmt=0, seed=0, prio=0,
               kind=Request):
        """Submit one request as it is given; returns it."""
        if op != CANCEL:
            while self.in_flight >= self.max_inflight:
                self.wait()
        while self._untaken() >= self.sq_entries:
            self.wait()
        # In one piece, so that the arena cannot be begun anew between them.
        both = pad(data, 8) + params
        at = self._place(both) if both else 0
        par = at + len(both) - len(params) if params else 0
        user_data = self.next_id
        self.next_id += 1
        index = self.sq_tail & (self.sq_entries - 1)
        SQE.pack_into(self.req, self.sq_off + index * self.sqe_size, op, prio,
                      flags, model, user_data, at if data else 0, len(data),
                      par, len(params), arg, max_tokens, timeout_ms, n, fmt,
                      0, 0, seed)
        request = self.requests[user_data] = kind(self, user_data)
        request.op = op
        if op != CANCEL:
            self.in_flight += 1
        self.sq_tail = (self.sq_tail + 1) & M32
        self.req_words[SQ_TAIL] = self.sq_tail
        self._ring()
        return request

    def _entry(self, at):
        """Copy the completion entry at this offset, and its blob."""
        (user_data, res, flags, kind, text_len, pos, logprob, sample, aux,
         blob, tail) = CQE.unpack_from(self.res, at)
        blobs = {}
        if flags & BLOB:
            size = struct.unpack_from("<I", self.res, blob)[0]
            blobs = unpack_blob(bytes(self.res[blob:blob + 8 + size]))
        text = blobs.get(BLOB_TEXT, tail[:text_len])
        return Entry(user_data, res, flags, kind, pos, logprob, sample, aux,
                     tail, text, blobs)

    def take(self):
        """Take all completions that are there; how many they were."""
        tail = self.res_words[CQ_TAIL]
        count = (tail - self.cq_head) & M32
        for _ in range(count):
            index = self.cq_head & (self.cq_entries - 1)
            entry = self._entry(self.cq_off + index * self.cqe_size)
            self.cq_head = (self.cq_head + 1) & M32
            request = self.requests.get(entry.user_data)
            if request is None:
                continue
            if entry.type in (FINAL, ACK):
                request.last = entry
                del self.requests[entry.user_data]
                if request.op != CANCEL:
                    self.in_flight -= 1
            else:
                request.entries.append(entry)
        if count:
            self.req_words[CQ_HEAD] = self.cq_head
            self._ring()
        return count

    def wait(self, timeout=0.1):
        """Take completions, or wait once for more; raises at the end."""
        if self.take():
            return
        if self.hung_up or self.res_words[FLAGS] & DEAD:
            if self.take():
                return
            reason = self.res_words[REASON]
            raise AprError(errno.ECONNRESET, "the session has ended: %s" % (
                REASONS[reason] if reason < len(REASONS) else reason))
        try:
            frame = self._receive(timeout)
            while frame:
                self._aside(frame)
                frame = self._receive(0)
        except AprError:
            if not self.hung_up:
                raise
        self.take()

    # Requests.

    def ping(self):
        """NOP: how long the daemon took, in nanoseconds."""
        last = self.submit(NOP).finish()
        return Pong(*struct.unpack_from("<QQ", last.tail))

    def _data(self, request, fmt):
        """All data of one format that a request answers."""
        out = b"".join(entry.blobs.get(fmt, b"") if fmt != BLOB_TEXT
                       else entry.text for entry in request)
        request.finish()
        return out

    def tokenize(self, text, model=0, special=False, bos=False):
        """The token ids of a text."""
        data = text.encode() if isinstance(text, str) else text
        flags = PARSE_SPECIAL * special | ADD_BOS * bos
        return unpack_ids(self._data(
            self.submit(TOKENIZE, data, model=model, flags=flags), BLOB_IDS))

    def detokenize(self, ids, model=0, special=False):
        """The bytes that token ids stand for."""
        return self._data(
            self.submit(DETOKENIZE, pack_ids(ids), model=model, fmt=FMT_IDS,
                        flags=PARSE_SPECIAL * special), BLOB_TEXT)

    def generate(self, prompt, max_tokens=32, seed=None, model=0,
                 special=False, bos=True, timeout_ms=0, **params):
        """GENERATE from a text or token ids: a Stream of Token.

        Parameters: stop, stop_ids, bias, logprobs, and the fields of SAMPLING
        (temperature, top_k, ...).
        """
        ids = not isinstance(prompt, (str, bytes))
        data = pack_ids(prompt) if ids else \
            prompt.encode() if isinstance(prompt, str) else prompt
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        flags = 0 if ids else PARSE_SPECIAL * special | ADD_BOS * bos
        stream = self.submit(
            GENERATE, data, parameters(**params), model=model, flags=flags,
            max_tokens=max_tokens, timeout_ms=timeout_ms, seed=seed,
            fmt=FMT_IDS if ids else FMT_TEXT, kind=Stream)
        stream.seed = seed
        return stream

    def score(self, ids, model=0, logprobs=None, forced=False):
        """The log-probabilities of token ids, a list of Score."""
        return unpack_scores(self._data(
            self.submit(SCORE, pack_ids(ids), parameters(logprobs=logprobs),
                        model=model, fmt=FMT_IDS, flags=FORCED * forced),
            BLOB_SCORES))

    def cancel(self, user_data):
        """Cancel a request; false if there was none or it had ended."""
        try:
            self.submit(CANCEL, arg=user_data).finish()
        except AprError as e:
            if e.errno != errno.ENOENT:
                raise
            return False
        return True

/* SPDX-License-Identifier: MIT */
/*
 * The wire: every structure, number and flag that a client and aprd share.
 *
 * Owns: layouts of entries, regions and socket frames, opcodes, flags, feature
 * bits, parameter types. Both sides compile this file and nothing else of each
 * other. Does not own: behaviour (shm/ring.h, client/, daemon/) nor prose
 * (aprd-protocol(7), which says the same in words).
 *
 * All integers are little-endian and naturally aligned. Strides, counts and
 * offsets of a session come from WELCOME and the result header, never from
 * sizeof. Structures grow only at the end; reserved fields must be zero.
 */
#ifndef APR_ABI_H
#define APR_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define APR_STATIC_ASSERT(cond, msg) static_assert(cond, msg)
extern "C" {
#else
#define APR_STATIC_ASSERT(cond, msg) _Static_assert(cond, msg)
#endif

#define APR_ABI_MAJOR 0u /* 0 until the first release; then a break is a new major */
#define APR_ABI_MINOR 1u

/* ---- submission entries ------------------------------------------------ */

enum apr_op {
	APR_OP_NOP = 0,
	APR_OP_GENERATE = 1,
	APR_OP_CHAT = 2,
	APR_OP_SCORE = 3,
	APR_OP_TOKENIZE = 4,
	APR_OP_DETOKENIZE = 5,
	APR_OP_EMBED = 6,
	APR_OP_CANCEL = 7,
	APR_OP_FREE = 8,
	APR_OP_LIMIT = 128 /* 128 and above are never assigned */
};

/* apr_sqe.flags */
#define APR_SQE_NO_STREAM 0x0001u     /* one DATA blob with the ids at the end instead of TOKENs */
#define APR_SQE_REPLAYABLE 0x0002u    /* may be resubmitted with RESUME after a restart */
#define APR_SQE_PARSE_SPECIAL 0x0004u /* special-token text in TEXT becomes control ids */
#define APR_SQE_KEEP 0x0008u          /* FINAL.handle names the conversation */
#define APR_SQE_FORCED 0x0010u        /* SCORE: compute every id by the decode arithmetic */
#define APR_SQE_ADD_BOS 0x0020u       /* TEXT: put BOS in front once where the model says so */
#define APR_SQE_FLAGS_ALL 0x003fu

/* apr_sqe.in_fmt */
enum apr_in_fmt {
	APR_IN_TEXT = 0,     /* UTF-8 bytes, length-delimited; invalid UTF-8 is tokenised as bytes */
	APR_IN_IDS = 1,      /* u32 ids, 4-aligned */
	APR_IN_MESSAGES = 2, /* JSON */
	APR_IN_PARTS = 3     /* mixed text, ids, bytes */
};

#define APR_MAX_TOKENS_CONTEXT UINT32_MAX /* max_tokens: up to the context's end */

struct apr_sqe {
	uint8_t op;
	uint8_t prio; /* 0 normal, 1 low (background), 2 high; capped by configuration */
	uint16_t flags;
	uint32_t model; /* 0 = default */
	uint64_t user_data;
	uint32_t in_off, in_len;   /* bytes from the request region's start */
	uint32_t par_off, par_len; /* parameter list, 8-aligned; len 0 = none */
	uint64_t arg;              /* CANCEL: target's user_data; GENERATE, CHAT, FREE: handle */
	uint32_t max_tokens;
	uint32_t timeout_ms; /* from acceptance; 0 = none */
	uint16_t n;          /* samples; 0 = 1 */
	uint8_t in_fmt;
	uint8_t region; /* 0 = own arena */
	uint32_t zero;
	uint64_t seed;
};

APR_STATIC_ASSERT(sizeof(struct apr_sqe) == 64, "an SQE is 64 bytes");
APR_STATIC_ASSERT(offsetof(struct apr_sqe, user_data) == 8, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_sqe, in_off) == 16, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_sqe, par_off) == 24, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_sqe, arg) == 32, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_sqe, max_tokens) == 40, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_sqe, n) == 48, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_sqe, zero) == 52, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_sqe, seed) == 56, "abi");

/* ---- parameters -------------------------------------------------------- */

enum apr_param_type {
	APR_PARAM_SAMPLING = 1,    /* struct apr_sampling */
	APR_PARAM_LOGPROBS = 2,    /* u32 K: K best of each step beside the token's own; <= APR_LOGPROBS_MAX */
	APR_PARAM_BIAS = 3,        /* {u32 id; f32 bias}[]; -inf bans, +inf and NaN are -EINVAL */
	APR_PARAM_STOP = 4,        /* {u32 len; bytes; pad to 4}[] */
	APR_PARAM_STOP_IDS = 5,    /* u32[] */
	APR_PARAM_GRAMMAR = 6,     /* not built yet */
	APR_PARAM_JSON_SCHEMA = 7, /* not built yet */
	APR_PARAM_MASK = 8,        /* not built yet */
	APR_PARAM_TOOLS = 9,       /* not built yet */
	APR_PARAM_RESUME = 10,     /* u32[] ids already received: pos goes on after them, max_tokens counts them */
	APR_PARAM_TRACE_ID = 11    /* 16 bytes, logged only */
};

#define APR_PARAM_OPTIONAL 0x0001u /* apr_param.flags: ignore if the type is unknown */
#define APR_PARAMS_MAX 65536u
#define APR_LOGPROBS_MAX 20u
#define APR_STOP_MAX 16u       /* stop strings a request */
#define APR_STOP_BYTES_MAX 256u /* bytes of one stop string */
#define APR_STOP_IDS_MAX 16u
#define APR_BIAS_MAX 1024u

struct apr_param { /* followed by len bytes of data, padded with zeros to 8 */
	uint16_t type, flags;
	uint32_t len;
};
APR_STATIC_ASSERT(sizeof(struct apr_param) == 8, "abi");

/* apr_sampling.set: which fields the request gives; others keep the model's value */
#define APR_SET_TEMPERATURE 0x0001u
#define APR_SET_TOP_K 0x0002u
#define APR_SET_TOP_P 0x0004u
#define APR_SET_MIN_P 0x0008u
#define APR_SET_REPEAT 0x0010u
#define APR_SET_FREQUENCY 0x0020u
#define APR_SET_PRESENCE 0x0040u
#define APR_SET_WINDOW 0x0080u
#define APR_SET_IGNORE_EOS 0x0100u
#define APR_SET_ALL 0x01ffu

struct apr_sampling {
	uint32_t set;
	float temperature; /* 0 = greedy; finite, >= 0 */
	int32_t top_k;     /* 0 or less = off */
	float top_p;       /* (0,1]; 1 = off; 0 keeps the best alone */
	float min_p;       /* [0,1]; 0 = off */
	float repeat_penalty;    /* > 0; 1 = off */
	float frequency_penalty; /* finite; 0 = off */
	float presence_penalty;
	int32_t penalty_window; /* ids looked back; -1 the whole context, 0 off */
	uint32_t ignore_eos;    /* 0 or 1 */
};
APR_STATIC_ASSERT(sizeof(struct apr_sampling) == 40, "abi");

/* ---- completion entries ------------------------------------------------ */

enum apr_cqe_type {
	APR_CQE_TOKEN = 1,      /* res = id, with its text */
	APR_CQE_PIECE = 2,      /* text with no token of its own */
	APR_CQE_DATA = 3,       /* a blob of a longer result */
	APR_CQE_SAMPLE_END = 4, /* sample `sample` has ended; aux low 8 = reason */
	APR_CQE_FINAL = 5,      /* the request's last entry */
	APR_CQE_ACK = 6         /* the FINAL of NOP, CANCEL and FREE */
};

#define APR_CQE_MORE 0x0001u /* more entries of this request follow */
#define APR_CQE_BLOB 0x0002u /* blob names a result in the result region */

enum apr_finish {
	APR_FINISH_NONE = 0,
	APR_FINISH_STOP = 1,        /* an end or stop id */
	APR_FINISH_STOP_STRING = 2,
	APR_FINISH_LENGTH = 3,
	APR_FINISH_CANCELLED = 4,
	APR_FINISH_TIMEOUT = 5,
	APR_FINISH_NUMERIC = 6,
	APR_FINISH_DRAINED = 7,
	APR_FINISH_ERROR = 8
};

/* apr_cqe.aux of FINAL and SAMPLE_END: reason | backend << 8 | route << 11 | fell_back << 15 */
enum apr_backend_id { APR_BACKEND_NONE = 0, APR_BACKEND_CPU = 1, APR_BACKEND_CUDA = 2, APR_BACKEND_FAKE = 7 };
enum apr_route_id {
	APR_ROUTE_NONE = 0,
	APR_ROUTE_F32 = 1,
	APR_ROUTE_QUANT = 2,
	APR_ROUTE_FP16 = 3,
	APR_ROUTE_FP8 = 4,
	APR_ROUTE_FP8_FAST = 5,
	APR_ROUTE_FUSED = 6,
	APR_ROUTE_INT16 = 7 /* CPU: quantised weights times 16-bit block activations */
};
#define APR_AUX(reason, backend, route, fell) \
	((uint16_t)((unsigned)(reason) | (unsigned)(backend) << 8 | (unsigned)(route) << 11 | (unsigned)(fell) << 15))
#define APR_AUX_REASON(aux) ((unsigned)(aux) & 0xffu)
#define APR_AUX_BACKEND(aux) ((unsigned)(aux) >> 8 & 7u)
#define APR_AUX_ROUTE(aux) ((unsigned)(aux) >> 11 & 15u)
#define APR_AUX_FELL_BACK(aux) ((unsigned)(aux) >> 15)

#define APR_CQE_TEXT_MAX 32u

struct apr_cqe_final {
	uint32_t queue_us, prefill_us, decode_us;
	uint32_t prompt, cached, generated; /* tokens */
	uint64_t handle;
};

struct apr_cqe_nop {
	uint64_t waited_ns, served_ns; /* tail seen late by; time from pick-up to this entry */
	uint64_t zero[2];
};

struct apr_cqe {
	uint64_t user_data;
	int32_t res; /* token id; FINAL and ACK: 0 or -errno (ACK of NOP: 0) */
	uint16_t flags;
	uint8_t type;
	uint8_t text_len; /* bytes of text in u.text; 0 with BLOB: the text is in the blob */
	uint32_t pos;     /* index in the answer; of an error: the culprit's byte offset in the SQE (below 64),
			     or 64 + its offset in the parameter list */
	float logprob;
	uint16_t sample;
	uint16_t aux;
	uint32_t blob;
	union {
		char text[APR_CQE_TEXT_MAX];
		struct apr_cqe_final final_;
		struct apr_cqe_nop nop;
	} u;
};
APR_STATIC_ASSERT(sizeof(struct apr_cqe) == 64, "a CQE is 64 bytes");
APR_STATIC_ASSERT(offsetof(struct apr_cqe, res) == 8, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_cqe, flags) == 12, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_cqe, pos) == 16, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_cqe, logprob) == 20, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_cqe, sample) == 24, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_cqe, blob) == 28, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_cqe, u) == 32, "abi");

/* Results too long for an entry: {len, fmt, flags, data}, 8-aligned in the result region.
 * One entry names one blob. A TOKEN with long text and top K has fmt TOKEN: a list of
 * sub-blobs {u32 len, u16 fmt, u16 flags, data padded to 8}. */
enum apr_blob_fmt {
	APR_BLOB_TEXT = 1,   /* bytes */
	APR_BLOB_TOP = 2,    /* struct apr_top[] best first */
	APR_BLOB_IDS = 3,    /* u32[] */
	APR_BLOB_ERROR = 4,  /* UTF-8, one line */
	APR_BLOB_SCORES = 5, /* {u32 pos, id; f32 logprob; u32 k; apr_top[k]}[] */
	APR_BLOB_EMBED = 6,  /* f32[] */
	APR_BLOB_LIST = 7    /* sub-blobs */
};

struct apr_blob {
	uint32_t len; /* bytes of data, without this header */
	uint16_t fmt, flags;
};
struct apr_top {
	uint32_t id;
	float logprob;
};
struct apr_score {
	uint32_t pos, id;
	float logprob;
	uint32_t k; /* apr_top entries that follow */
};
APR_STATIC_ASSERT(sizeof(struct apr_blob) == 8 && sizeof(struct apr_top) == 8 && sizeof(struct apr_score) == 16, "abi");

/* ---- regions ----------------------------------------------------------- */

#define APR_REGION_MAGIC UINT64_C(0x31304e4f49475241) /* "ARGION01" read as bytes */
#define APR_REGION_HDR 4096u
#define APR_REGION_DEFAULT 131072u
#define APR_SQ_DEFAULT 64u
#define APR_CQ_DEFAULT 256u
#define APR_SQ_MAX 4096u
#define APR_CQ_MAX 16384u
#define APR_REGION_MAX (256u << 20)

enum apr_wait_how { APR_WAIT_NONE = 0, APR_WAIT_FUTEX = 1, APR_WAIT_SOCKET = 2, APR_WAIT_SOCKET_ALWAYS = 3 };

/* written by the client, read by the daemon; each word group on its own 128 bytes */
struct apr_req_hdr {
	uint32_t sq_tail;
	uint8_t pad0[124];
	uint32_t cq_head;
	uint8_t pad1[124];
	uint32_t wait_seq; /* odd = asleep */
	uint32_t wake_at;  /* cq_tail worth a wake */
	uint32_t wait_how;
	uint8_t pad2[116];
};
APR_STATIC_ASSERT(offsetof(struct apr_req_hdr, sq_tail) == 0x000, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_req_hdr, cq_head) == 0x080, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_req_hdr, wait_seq) == 0x100, "abi");
APR_STATIC_ASSERT(sizeof(struct apr_req_hdr) == 0x180, "abi");

/* apr_res_hdr.flags */
#define APR_RES_NEED_WAKEUP 0x1u /* ring the doorbell after a tail store */
#define APR_RES_CQ_STALLED 0x2u  /* something waits for room in the CQ */
#define APR_RES_DRAINING 0x4u
#define APR_RES_DEAD 0x8u /* nothing more will come; reason says why */

enum apr_reason { /* apr_res_hdr.reason and BYE */
	APR_REASON_NONE = 0,
	APR_REASON_SHUTDOWN = 1,
	APR_REASON_RESTART = 2,
	APR_REASON_PROTOCOL = 3, /* the client broke a rule of the ring */
	APR_REASON_FAULT = 4,    /* the client's memory could not be read */
	APR_REASON_QUOTA = 5,
	APR_REASON_ADMIN = 6
};

/* written by the daemon only; the client's map is read-only */
struct apr_res_hdr {
	/* 0x000: constants, set before the descriptor is sent */
	uint64_t magic;
	uint16_t major, minor;
	uint32_t hdr_len;
	uint64_t epoch, session;
	uint32_t sq_entries, sqe_size, sq_off;
	uint32_t cq_entries, cqe_size, cq_off;
	uint32_t req_arena_off, req_arena_len;
	uint32_t res_arena_off, res_arena_len;
	uint32_t max_inflight, zero0;
	uint8_t pad0[128 - 80];
	uint32_t cq_tail; /* 0x080, the futex */
	uint8_t pad1[124];
	uint32_t sq_head; /* 0x100 */
	uint8_t pad2[124];
	uint32_t flags, reason; /* 0x180 */
	uint8_t pad3[120];
	uint32_t poll_us, spin_us, models_gen; /* 0x200 */
	uint8_t pad4[116];
	uint64_t counters[16]; /* 0x280: see enum apr_counter */
};
APR_STATIC_ASSERT(offsetof(struct apr_res_hdr, epoch) == 16, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_res_hdr, sq_entries) == 32, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_res_hdr, max_inflight) == 72, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_res_hdr, cq_tail) == 0x080, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_res_hdr, sq_head) == 0x100, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_res_hdr, flags) == 0x180, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_res_hdr, poll_us) == 0x200, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_res_hdr, counters) == 0x280, "abi");

enum apr_counter { /* apr_res_hdr.counters */
	APR_COUNT_SQES = 0,
	APR_COUNT_CQES = 1,
	APR_COUNT_WAKES = 2,     /* futex wakes and NOTIFY frames sent */
	APR_COUNT_DOORBELLS = 3, /* doorbells seen */
	APR_COUNT_PARKED = 4,    /* times something waited for CQ room */
	APR_COUNT_TOKENS = 5
};

/* ---- socket frames ----------------------------------------------------- */

#define APR_FRAME_MAGIC UINT32_C(0x31525041) /* "APR1" */
#define APR_FRAME_MAX 32768u                 /* above: a sealed memfd */

enum apr_frame_type {
	APR_FRAME_HELLO = 1,
	APR_FRAME_WELCOME = 2,
	APR_FRAME_READY = 3,
	APR_FRAME_GET_MODELS = 4, /* answer: same type, body apr_model_row[] */
	APR_FRAME_GET_VOCAB = 5,  /* body u32 model; answer: a read-only memfd, struct apr_vocab_hdr */
	APR_FRAME_ATTACH = 6,     /* -EOPNOTSUPP for now */
	APR_FRAME_NOTIFY = 7,     /* 16 bytes: the header alone */
	APR_FRAME_MODEL_CHANGED = 8,
	APR_FRAME_BYE = 9, /* err = apr_reason, body text */
	APR_FRAME_CANCEL_ALL = 10,
	APR_FRAME_STATUS = 11, /* answer: JSON */
	/* admin socket only */
	APR_FRAME_LOAD = 32,   /* body JSON {"name","path"} */
	APR_FRAME_UNLOAD = 33, /* body JSON {"name"} */
	APR_FRAME_WARMUP = 34,
	APR_FRAME_RELOAD = 35,
	APR_FRAME_DRAIN = 36,  /* body JSON {"timeout_ms"} */
	APR_FRAME_CANCEL = 37, /* body JSON {"session"[,"user_data"]} */
	APR_FRAME_TRACE = 38,
	APR_FRAME_LOG = 39 /* body JSON {"level"} */
};

#define APR_FRAME_FD_BODY 0x0001u /* apr_frame.flags: the body is in the descriptor sent with it */

struct apr_frame {
	uint32_t magic;
	uint16_t type, flags;
	uint32_t size; /* whole frame, this header included */
	int32_t err;   /* nonzero: the body is the reason in UTF-8 */
};
APR_STATIC_ASSERT(sizeof(struct apr_frame) == 16, "abi");

#define APR_HELLO_RING_ALWAYS 0x1u /* this client rings after each tail store and waits by SOCKET_ALWAYS */

struct apr_hello {
	struct apr_frame hdr;
	uint16_t major, minor;
	uint32_t flags;
	uint64_t need, want; /* feature bits */
	uint32_t sq_entries, cq_entries, req_size, res_size; /* 0 = default */
	uint16_t sqe_size, cqe_size;
	uint32_t zero0;
	uint64_t old_epoch, old_session;
	char name[32]; /* NUL-padded, for status only */
	uint8_t zero1[16];
};
APR_STATIC_ASSERT(sizeof(struct apr_hello) == 128, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_hello, need) == 24, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_hello, sq_entries) == 40, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_hello, sqe_size) == 56, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_hello, old_epoch) == 64, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_hello, name) == 80, "abi");

enum apr_fd_kind { APR_FD_NONE = 0, APR_FD_REQ = 1, APR_FD_RES = 2, APR_FD_DOORBELL = 3 };

struct apr_welcome {
	struct apr_frame hdr;
	uint16_t major, minor;
	uint32_t flags;
	uint64_t features;
	uint64_t epoch, session;
	uint32_t req_size, res_size, max_inflight, max_input;
	uint32_t max_blob, default_model, n_models, models_gen;
	uint8_t fd_kind[8]; /* of the descriptors in the same message, in order */
	uint64_t opcodes[2];
	uint32_t poll_us, spin_us;
	uint8_t zero[16];
};
APR_STATIC_ASSERT(sizeof(struct apr_welcome) == 128, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_welcome, features) == 24, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_welcome, epoch) == 32, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_welcome, req_size) == 48, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_welcome, fd_kind) == 80, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_welcome, opcodes) == 88, "abi");
APR_STATIC_ASSERT(offsetof(struct apr_welcome, poll_us) == 104, "abi");

/* Feature bits of need, want and features. The table stands in aprd-protocol(7) too. */
#define APR_FEAT_SAMPLING (UINT64_C(1) << 0)   /* SAMPLING, BIAS, STOP, STOP_IDS parameters */
#define APR_FEAT_LOGPROBS (UINT64_C(1) << 1)
#define APR_FEAT_SAMPLES (UINT64_C(1) << 2)    /* n > 1 */
#define APR_FEAT_HANDLES (UINT64_C(1) << 3)    /* KEEP, FREE, arg of GENERATE */
#define APR_FEAT_REPLAY (UINT64_C(1) << 4)     /* REPLAYABLE, RESUME */
#define APR_FEAT_PARTS (UINT64_C(1) << 5)      /* in_fmt PARTS */
#define APR_FEAT_MESSAGES (UINT64_C(1) << 6)   /* in_fmt MESSAGES, CHAT */
#define APR_FEAT_GRAMMAR (UINT64_C(1) << 7)    /* GRAMMAR, JSON_SCHEMA, MASK */
#define APR_FEAT_TOOLS (UINT64_C(1) << 8)
#define APR_FEAT_ATTACH (UINT64_C(1) << 9)
#define APR_FEAT_VOCAB (UINT64_C(1) << 10)     /* GET_VOCAB */
#define APR_FEAT_FORCED (UINT64_C(1) << 11)    /* SCORE with FORCED */

struct apr_model_row {
	uint32_t id, flags; /* flags: 1 = default */
	uint32_t n_ctx, n_vocab;
	uint8_t weights_hash[32];
	uint8_t receipt[16];
	char name[64]; /* NUL-terminated */
};
APR_STATIC_ASSERT(sizeof(struct apr_model_row) == 128, "abi");

/* GET_VOCAB's memfd: header, u32 offsets[n_vocab + 1] into the bytes, u8 kinds[n_vocab], bytes */
struct apr_vocab_hdr {
	uint64_t magic; /* "APRVOCAB" */
	uint32_t model, n_vocab;
	uint32_t offsets_off, kinds_off, bytes_off, bytes_len;
};
#define APR_VOCAB_MAGIC UINT64_C(0x4241434f56525041)
APR_STATIC_ASSERT(sizeof(struct apr_vocab_hdr) == 32, "abi");

#ifdef __cplusplus
}
#endif
#endif

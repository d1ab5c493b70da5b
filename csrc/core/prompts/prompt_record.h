/* prompt_record: the format of a prompt store's files: members, sizes and limits of
 * headers, notes and heads.
 *
 * All numbers are little-endian. A record is a header, the payload of its parts without
 * gaps, and zeros up to a multiple of MLS_PROMPT_UNIT. The header has a checksum over
 * itself, and the checksum of each part. Files are untrusted: the functions that parse
 * bytes check every length, and every sum of lengths.
 */
#ifndef MLS_PROMPT_RECORD_H
#define MLS_PROMPT_RECORD_H

#include "base/size.h"
#include "base/status.h"
#include "crc32c/crc32c.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MLS_PROMPT_VERSION = 1,
    MLS_PROMPT_UNIT = 64,      /* records start and end at a multiple of it */
    MLS_PROMPT_FILE_HEAD = 64, /* bytes of the head of each file of the log */
    MLS_PROMPT_KEY = 16,
    MLS_PROMPT_FINGERPRINT = 32,
    MLS_PROMPT_FIXED = 128, /* bytes of a header without tokens, parts and meta */
    MLS_PROMPT_PART = 16,   /* bytes of one part in a header */
    MLS_PROMPT_NOTE = 24,   /* bytes of one note: key, operation, segment */
    MLS_PROMPT_EXTRA = 36,  /* bytes of one extra: position, digest */
    MLS_PROMPT_MAX_TOKENS = 65536,
    MLS_PROMPT_MAX_PARTS = 65536,
    MLS_PROMPT_MAX_META = 1 << 20,
    /* room for the largest header */
    MLS_PROMPT_MAX_HEADER = 2 << 20
};

/* 128 bits of a keyed hash of the parent's key, the kind and the token ids. */
typedef struct mls_prompt_key {
    unsigned char bytes[MLS_PROMPT_KEY];
} mls_prompt_key;

/* Return whether two keys have the same bytes. */
bool mls_prompt_key_equal(const mls_prompt_key *a, const mls_prompt_key *b);

/* The running hash behind a key: SipHash-2-4 with 128 bits. Its secret is the random id
 * of the store, so that only a program that reads the folder can prepare two texts
 * with one key. Plain data; a copy continues separately. */
typedef struct mls_prompt_hash {
    uint64_t v[4];
    uint64_t word; /* bytes that fill no word yet */
    size_t bytes;
} mls_prompt_hash;

/* Begin the key of a record of `kind` with the key of its parent. `id` is the store's, of
 * MLS_PROMPT_KEY bytes. */
mls_prompt_hash mls_prompt_hash_begin(const unsigned char *id,
                                      const mls_prompt_key *parent, unsigned kind);
/* Begin the key of the root of all prompts with a fingerprint of at most
 * MLS_PROMPT_FINGERPRINT bytes, padded with zeros. */
mls_prompt_hash mls_prompt_hash_root(const unsigned char *id, const unsigned char *padded,
                                     size_t bytes);
/* Continue the key with `count` token ids. */
void mls_prompt_hash_tokens(mls_prompt_hash *hash, const uint32_t *tokens, size_t count);
/* Continue the key of a record of `kind` with the digest of an extra, which counts for
 * the tokens behind it: MLS_PROMPT_EXTRA - 4 bytes. */
void mls_prompt_hash_extra(mls_prompt_hash *hash, const unsigned char *id, unsigned kind,
                           const unsigned char *digest);
/* Return the key of the tokens until now; the hash can continue. */
mls_prompt_key mls_prompt_hash_key(const mls_prompt_hash *hash);

/* The type of a header: of a record, or of notes. */
typedef enum mls_prompt_type {
    MLS_PROMPT_RECORD,
    MLS_PROMPT_NOTES /* `meta` is a list of notes about other records */
} mls_prompt_type;

enum {
    MLS_PROMPT_MOVED = 1,       /* a copy, made by a compaction, which is not a use */
    MLS_PROMPT_MOVED_PINNED = 2 /* it was pinned then */
};

/* One part of a payload. */
typedef struct mls_prompt_part {
    uint64_t bytes;
    uint32_t crc;
} mls_prompt_part;

/* A header. Pointers are borrowed: from the caller, or from the bytes that were
 * parsed. */
typedef struct mls_prompt_header {
    mls_prompt_type type;
    unsigned kind;
    unsigned flags; /* MLS_PROMPT_MOVED ... */
    mls_prompt_key key, parent;
    unsigned char fingerprint[MLS_PROMPT_FINGERPRINT]; /* padded with zeros */
    size_t fingerprint_bytes;
    uint64_t put;       /* number of the put that wrote it */
    uint64_t end;       /* tokens of the prompt up to the end of the record */
    size_t token_count; /* of the record itself */
    size_t extra_count; /* of the record itself */
    size_t part_count;
    uint64_t payload_bytes;      /* of all parts */
    const unsigned char *tokens; /* 4 bytes each */
    const unsigned char *extras; /* MLS_PROMPT_EXTRA bytes each, by position */
    const unsigned char *parts;  /* see mls_prompt_header_part */
    const unsigned char *meta;
    size_t meta_bytes;
    size_t header_bytes;
    uint64_t record_bytes;
    uint32_t crc; /* of the header */
} mls_prompt_header;

/* Return the length and the checksum of part `i` of a parsed header. */
static inline mls_prompt_part mls_prompt_header_part(const mls_prompt_header *header,
                                                     size_t i)
{
    const unsigned char *at = header->parts + MLS_PROMPT_PART * i;
    return (mls_prompt_part){.bytes = mls_load_le64(at), .crc = mls_load_le32(at + 8)};
}

/* Return token id `i` of a parsed header. */
static inline uint32_t mls_prompt_header_token(const mls_prompt_header *header, size_t i)
{
    return mls_load_le32(header->tokens + 4 * i);
}

/* Compute `header_bytes` and `record_bytes` from the counts and `payload` bytes, and set
 * `payload_bytes`. MLS_E_VALUE: more tokens, extras, parts or meta than a header may
 * have; MLS_E_SIZE. */
mls_code mls_prompt_header_sizes(mls_prompt_header *header, uint64_t payload,
                                 mls_status *st);

/* Write a header to `out`, which has header->header_bytes bytes (see
 * mls_prompt_header_sizes), and set its `crc`. `tokens` and `parts` have its token_count
 * and part_count entries; of the borrowed pointers of the header only `extras` and
 * `meta` are read. */
void mls_prompt_header_write(mls_prompt_header *header, const uint32_t *tokens,
                             const mls_prompt_part *parts, const mls_crc_kernels *crc,
                             unsigned char *out);

/* Parse the start of a record: `bytes` bytes at `data`, of a record with at most `left`
 * bytes in its file. `*out` borrows `data`.
 * MLS_E_CHECKSUM: the magic number or the checksum is wrong. MLS_E_FORMAT: a length is.
 * MLS_E_CAPACITY: the header is longer than `bytes`; its length is out->header_bytes. */
mls_code mls_prompt_header_parse(const unsigned char *data, size_t bytes, uint64_t left,
                                 const mls_crc_kernels *crc, mls_prompt_header *out,
                                 mls_status *st);

/* Return whether the four bytes at `data` are the magic number of a header. */
bool mls_prompt_header_begins(const unsigned char *data);

/* Copy `bytes`, the header->header_bytes bytes of a stored header, to `out` with the
 * fields `put` and `flags` of `header`, and set its `crc`. */
void mls_prompt_header_copy(mls_prompt_header *header, const unsigned char *bytes,
                            const mls_crc_kernels *crc, unsigned char *out);

/* The operation of a note, which records the new state of the record with a key. */
typedef enum mls_prompt_operation {
    MLS_PROMPT_PIN,
    MLS_PROMPT_UNPIN,
    MLS_PROMPT_DELETE, /* of the record in `segment`, and of older copies */
    MLS_PROMPT_DROP    /* only for mls_prompt_mark: it writes MLS_PROMPT_DELETE */
} mls_prompt_operation;

typedef struct mls_prompt_note {
    mls_prompt_key key;
    uint32_t operation, segment;
} mls_prompt_note;

/* Write a note to the MLS_PROMPT_NOTE bytes at `out`, and read one from `data`. */
void mls_prompt_note_write(unsigned char *out, const mls_prompt_note *note);
mls_prompt_note mls_prompt_note_read(const unsigned char *data);

/* The head of a file of the log: eight letters, the version, a checksum, the store's id,
 * and one number. */
typedef struct mls_prompt_head {
    unsigned char id[MLS_PROMPT_KEY];
    uint32_t number;
} mls_prompt_head;

/* Write the head of a file, with these eight `letters`, to the MLS_PROMPT_FILE_HEAD bytes
 * at `out`. */
void mls_prompt_head_write(unsigned char *out, const char *letters,
                           const mls_prompt_head *head, const mls_crc_kernels *crc);
/* Parse the MLS_PROMPT_FILE_HEAD bytes at `data`.
 * MLS_E_FORMAT: other letters, a newer version, a wrong checksum. */
mls_code mls_prompt_head_parse(const unsigned char *data, const char *letters,
                               const mls_crc_kernels *crc, mls_prompt_head *out,
                               mls_status *st);

#endif

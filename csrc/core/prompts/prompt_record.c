/* prompt_record: the key of a record (a hash of its tokens); bytes and checks of headers,
 * notes and heads of files.
 *
 * Layout of a record's header, in bytes:
 *   0 magic, 4 checksum of the rest, 8 header_bytes, 12 type, 13 kind,
 *   14 fingerprint_bytes, 15 flags, 16 record_bytes, 24 put, 32 key, 48 parent,
 *   64 fingerprint, 96 end, 104 words of tokens and extras, 108 part_count, 112
 * meta_bytes, 116 extra_count, 128 tokens, extras, parts, meta
 */
#include "prompts/prompt_record.h"

#include "base/size.h"

#include <string.h>

enum {
    MAGIC = 0x5270736d,                 /* "mspR" */
    EXTRA_WORDS = MLS_PROMPT_EXTRA / 4, /* an extra takes the place of so many tokens */
    MAX_WORDS = MLS_PROMPT_MAX_TOKENS * (1 + EXTRA_WORDS),
    EXTRA_KIND = 256 /* added to a kind, which is less */
};

bool mls_prompt_key_equal(const mls_prompt_key *a, const mls_prompt_key *b)
{
    return memcmp(a->bytes, b->bytes, MLS_PROMPT_KEY) == 0;
}

/* ---- SipHash-2-4, 128 bits (Aumasson and Bernstein) ---- */

static inline uint64_t rotate(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

/* SipRound of the hash, on its four words of state. */
static inline void mix_round(uint64_t *v)
{
    v[0] += v[1];
    v[1] = rotate(v[1], 13) ^ v[0];
    v[0] = rotate(v[0], 32);
    v[2] += v[3];
    v[3] = rotate(v[3], 16) ^ v[2];
    v[0] += v[3];
    v[3] = rotate(v[3], 21) ^ v[0];
    v[2] += v[1];
    v[1] = rotate(v[1], 17) ^ v[2];
    v[2] = rotate(v[2], 32);
}

/* Add a word of the message: two rounds for each word. */
static inline void mix_word(uint64_t *v, uint64_t word)
{
    v[3] ^= word;
    mix_round(v);
    mix_round(v);
    v[0] ^= word;
}

/* Add `words` words of 8 bytes at `data`; the hash has whole words until now. */
static void mix_bytes(mls_prompt_hash *hash, const unsigned char *data, size_t words)
{
    for (size_t i = 0; i < words; i++) {
        mix_word(hash->v, mls_load_le64(data + 8 * i));
        hash->bytes += 8;
    }
}

/* Return the state of SipHash with the key `id` (16 bytes); 0xee selects a result of 128
 * bits. */
static mls_prompt_hash begin_hash(const unsigned char *id)
{
    const uint64_t k0 = mls_load_le64(id), k1 = mls_load_le64(id + 8);
    return (mls_prompt_hash){.v = {k0 ^ 0x736f6d6570736575U,
                                   k1 ^ 0x646f72616e646f6dU ^ 0xee,
                                   k0 ^ 0x6c7967656e657261U, k1 ^ 0x7465646279746573U}};
}

/* Begin the key of a record. The first words are the parent's key and the kind. */
mls_prompt_hash mls_prompt_hash_begin(const unsigned char *id,
                                      const mls_prompt_key *parent, unsigned kind)
{
    mls_prompt_hash hash = begin_hash(id);
    mix_bytes(&hash, parent->bytes, MLS_PROMPT_KEY / 8);
    mix_word(hash.v, kind);
    hash.bytes += 8;
    return hash;
}

/* Begin the key of the root of a fingerprint. A root has a first word that no kind has,
 * so it never equals the key of a record. */
mls_prompt_hash mls_prompt_hash_root(const unsigned char *id, const unsigned char *padded,
                                     size_t bytes)
{
    mls_prompt_hash hash = begin_hash(id);
    mix_word(hash.v, ~(uint64_t)bytes);
    hash.bytes += 8;
    mix_bytes(&hash, padded, MLS_PROMPT_FINGERPRINT / 8);
    return hash;
}

/* Continue a key with token ids. An id has four bytes, so every second one completes a
 * word. */
void mls_prompt_hash_tokens(mls_prompt_hash *hash, const uint32_t *tokens, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (hash->bytes % 8 == 0) {
            hash->word = tokens[i];
        } else {
            mix_word(hash->v, hash->word | (uint64_t)tokens[i] << 32);
            hash->word = 0;
        }
        hash->bytes += 4;
    }
}

/* Continue a key with a digest. The key until now takes the place of the text, and the
 * kind has a number that no record has, so no other text has the same words. */
void mls_prompt_hash_extra(mls_prompt_hash *hash, const unsigned char *id, unsigned kind,
                           const unsigned char *digest)
{
    const mls_prompt_key key = mls_prompt_hash_key(hash);
    *hash = mls_prompt_hash_begin(id, &key, kind + EXTRA_KIND);
    mix_bytes(hash, digest, (MLS_PROMPT_EXTRA - 4) / 8);
}

/* Return the key until now. End a copy of the hash: the last word has the length in its
 * highest byte. */
mls_prompt_key mls_prompt_hash_key(const mls_prompt_hash *hash)
{
    mls_prompt_key key;
    uint64_t v[4];
    memcpy(v, hash->v, sizeof v);
    mix_word(v, (hash->bytes % 8 != 0 ? hash->word : 0) | (uint64_t)hash->bytes << 56);
    v[2] ^= 0xee;
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 4; i++) {
            mix_round(v);
        }
        mls_store_le64(key.bytes + 8 * half, v[0] ^ v[1] ^ v[2] ^ v[3]);
        v[1] ^= 0xdd;
    }
    return key;
}

/* ---- headers ---- */

/* Return the bytes of a header with `words` words of tokens and extras, `parts` parts and
 * `meta` bytes of meta, rounded up to units. The counts are limited, so their sum
 * fits. */
static size_t compute_header_bytes(size_t words, size_t parts, size_t meta)
{
    const size_t bytes = MLS_PROMPT_FIXED + 4 * words + MLS_PROMPT_PART * parts + meta;
    return (bytes + MLS_PROMPT_UNIT - 1) / MLS_PROMPT_UNIT * MLS_PROMPT_UNIT;
}

/* Return whether a header may have so many words, extras, parts and bytes of meta. */
static bool counts_fit(size_t words, size_t extras, size_t parts, size_t meta)
{
    return words <= MAX_WORDS && extras <= words / EXTRA_WORDS &&
           words - EXTRA_WORDS * extras <= MLS_PROMPT_MAX_TOKENS &&
           parts <= MLS_PROMPT_MAX_PARTS && meta <= MLS_PROMPT_MAX_META &&
           compute_header_bytes(words, parts, meta) <= MLS_PROMPT_MAX_HEADER;
}

/* Return the words of the tokens and extras of a header. */
static size_t count_words(const mls_prompt_header *header)
{
    return header->token_count + EXTRA_WORDS * header->extra_count;
}

/* Set `*out` to `bytes` rounded up to whole units. Returns false on overflow, or if the
 * number of units does not fit an entry. */
static bool round_record(uint64_t bytes, uint64_t *out)
{
    if (!mls_u64_add(bytes, MLS_PROMPT_UNIT - 1, &bytes)) {
        return false;
    }
    *out = bytes / MLS_PROMPT_UNIT * MLS_PROMPT_UNIT;
    return *out / MLS_PROMPT_UNIT < UINT32_MAX;
}

/* Compute the lengths of header and record. The payload and the header are rounded up
 * together to whole units. */
mls_code mls_prompt_header_sizes(mls_prompt_header *header, uint64_t payload,
                                 mls_status *st)
{
    const size_t words = count_words(header);
    if (!counts_fit(words, header->extra_count, header->part_count, header->meta_bytes)) {
        return mls_fail(st, MLS_E_VALUE,
                        "a record has %zu tokens, %zu extras, %zu parts and %zu bytes of "
                        "meta: more than a header can hold",
                        header->token_count, header->extra_count, header->part_count,
                        header->meta_bytes);
    }
    header->header_bytes =
        compute_header_bytes(words, header->part_count, header->meta_bytes);
    header->payload_bytes = payload;
    uint64_t bytes;
    if (!mls_u64_add(header->header_bytes, payload, &bytes) ||
        !round_record(bytes, &header->record_bytes)) {
        return mls_fail(st, MLS_E_SIZE, "a record of %llu bytes is too large",
                        (unsigned long long)payload);
    }
    return MLS_OK;
}

/* Write tokens, extras, parts and meta of a header one after the other to `out`. */
static void write_variable_parts(const mls_prompt_header *header, const uint32_t *tokens,
                                 const mls_prompt_part *parts, unsigned char *out)
{
    for (size_t i = 0; i < header->token_count; i++, out += 4) {
        mls_store_le32(out, tokens[i]);
    }
    if (header->extra_count > 0) {
        memcpy(out, header->extras, MLS_PROMPT_EXTRA * header->extra_count);
        out += MLS_PROMPT_EXTRA * header->extra_count;
    }
    for (size_t i = 0; i < header->part_count; i++, out += MLS_PROMPT_PART) {
        mls_store_le64(out, parts[i].bytes);
        mls_store_le32(out + 8, parts[i].crc);
        mls_store_le32(out + 12, 0);
    }
    if (header->meta_bytes > 0) {
        memcpy(out, header->meta, header->meta_bytes);
    }
}

/* Offsets of the fields of a record's header, behind its magic number. Tokens, extras,
 * parts and meta follow at MLS_PROMPT_FIXED. */
enum {
    AT_CRC = 4,
    AT_HEADER_BYTES = 8,
    AT_TYPE = 12,
    AT_KIND = 13,
    AT_FINGERPRINT_BYTES = 14,
    AT_FLAGS = 15,
    AT_RECORD_BYTES = 16,
    AT_PUT = 24,
    AT_KEY = 32,
    AT_PARENT = 48,
    AT_FINGERPRINT = 64,
    AT_END = 96,
    AT_WORDS = 104, /* the number of tokens, and nine for each extra */
    AT_PARTS = 108, /* their number */
    AT_META = 112,  /* its bytes */
    AT_EXTRAS = 116 /* their number */
};

/* Return the checksum of a header of `bytes` bytes: of all behind magic number and
 * checksum. */
static uint32_t checksum_header(const unsigned char *data, size_t bytes,
                                const mls_crc_kernels *crc)
{
    return crc->update(0, data + AT_HEADER_BYTES, bytes - AT_HEADER_BYTES);
}

/* Write a header with its checksum. Bytes that no field uses are zeros. */
void mls_prompt_header_write(mls_prompt_header *header, const uint32_t *tokens,
                             const mls_prompt_part *parts, const mls_crc_kernels *crc,
                             unsigned char *out)
{
    memset(out, 0, header->header_bytes);
    mls_store_le32(out, MAGIC);
    mls_store_le32(out + AT_HEADER_BYTES, (uint32_t)header->header_bytes);
    out[AT_TYPE] = (unsigned char)header->type;
    out[AT_KIND] = (unsigned char)header->kind;
    out[AT_FINGERPRINT_BYTES] = (unsigned char)header->fingerprint_bytes;
    out[AT_FLAGS] = (unsigned char)header->flags;
    mls_store_le64(out + AT_RECORD_BYTES, header->record_bytes);
    mls_store_le64(out + AT_PUT, header->put);
    memcpy(out + AT_KEY, header->key.bytes, MLS_PROMPT_KEY);
    memcpy(out + AT_PARENT, header->parent.bytes, MLS_PROMPT_KEY);
    memcpy(out + AT_FINGERPRINT, header->fingerprint, MLS_PROMPT_FINGERPRINT);
    mls_store_le64(out + AT_END, header->end);
    mls_store_le32(out + AT_WORDS, (uint32_t)count_words(header));
    mls_store_le32(out + AT_PARTS, (uint32_t)header->part_count);
    mls_store_le32(out + AT_META, (uint32_t)header->meta_bytes);
    mls_store_le32(out + AT_EXTRAS, (uint32_t)header->extra_count);
    write_variable_parts(header, tokens, parts, out + MLS_PROMPT_FIXED);
    header->crc = checksum_header(out, header->header_bytes, crc);
    mls_store_le32(out + AT_CRC, header->crc);
}

/* Copy a header with other `put` and `flags`. Only `flags` and `put` are written again,
 * and then the checksum over all fields. */
void mls_prompt_header_copy(mls_prompt_header *header, const unsigned char *bytes,
                            const mls_crc_kernels *crc, unsigned char *out)
{
    memcpy(out, bytes, header->header_bytes);
    out[AT_FLAGS] = (unsigned char)header->flags;
    mls_store_le64(out + AT_PUT, header->put);
    header->crc = checksum_header(out, header->header_bytes, crc);
    mls_store_le32(out + AT_CRC, header->crc);
}

bool mls_prompt_header_begins(const unsigned char *data)
{
    return mls_load_le32(data) == MAGIC;
}

/* Set `*out` to the header at `data`, whose lengths are valid and whose checksum was
 * compared: its fields at fixed offsets, and pointers to tokens, extras, parts and meta.
 * There are two types; a store with another one has another version of the format. */
static void read_fields(const unsigned char *data, mls_prompt_header *out)
{
    *out = (mls_prompt_header){
        .type = data[AT_TYPE] == MLS_PROMPT_NOTES ? MLS_PROMPT_NOTES : MLS_PROMPT_RECORD,
        .kind = data[AT_KIND],
        .fingerprint_bytes = data[AT_FINGERPRINT_BYTES],
        .flags = data[AT_FLAGS],
        .put = mls_load_le64(data + AT_PUT),
        .end = mls_load_le64(data + AT_END),
        .extra_count = mls_load_le32(data + AT_EXTRAS),
        .part_count = mls_load_le32(data + AT_PARTS),
        .meta_bytes = mls_load_le32(data + AT_META),
        .header_bytes = mls_load_le32(data + AT_HEADER_BYTES),
        .record_bytes = mls_load_le64(data + AT_RECORD_BYTES),
        .crc = mls_load_le32(data + AT_CRC),
    };
    memcpy(out->key.bytes, data + AT_KEY, MLS_PROMPT_KEY);
    memcpy(out->parent.bytes, data + AT_PARENT, MLS_PROMPT_KEY);
    memcpy(out->fingerprint, data + AT_FINGERPRINT, MLS_PROMPT_FINGERPRINT);
    out->token_count = mls_load_le32(data + AT_WORDS) - EXTRA_WORDS * out->extra_count;
    out->tokens = data + MLS_PROMPT_FIXED;
    out->extras = out->tokens + 4 * out->token_count;
    out->parts = out->extras + MLS_PROMPT_EXTRA * out->extra_count;
    out->meta = out->parts + MLS_PROMPT_PART * out->part_count;
}

/* Set `payload_bytes` to the sum of all parts. Returns whether the header and its parts,
 * rounded up to units, have exactly the bytes of the record. */
static bool sum_parts(mls_prompt_header *header)
{
    uint64_t bytes = header->header_bytes, rounded = 0;
    for (size_t i = 0; i < header->part_count; i++) {
        if (!mls_u64_add(bytes, mls_prompt_header_part(header, i).bytes, &bytes)) {
            return false;
        }
    }
    header->payload_bytes = bytes - header->header_bytes;
    return round_record(bytes, &rounded) && rounded == header->record_bytes;
}

/* Parse and check a header. Check the lengths first, then the checksum, then the parts: a
 * checksum needs a valid length. */
mls_code mls_prompt_header_parse(const unsigned char *data, size_t bytes, uint64_t left,
                                 const mls_crc_kernels *crc, mls_prompt_header *out,
                                 mls_status *st)
{
    if (bytes < MLS_PROMPT_FIXED || mls_load_le32(data) != MAGIC) {
        return mls_fail(st, MLS_E_CHECKSUM, "no record starts here");
    }
    const size_t header_bytes = mls_load_le32(data + AT_HEADER_BYTES);
    const size_t words = mls_load_le32(data + AT_WORDS),
                 extras = mls_load_le32(data + AT_EXTRAS),
                 parts = mls_load_le32(data + AT_PARTS);
    const size_t meta = mls_load_le32(data + AT_META);
    if (!counts_fit(words, extras, parts, meta) ||
        data[AT_FINGERPRINT_BYTES] > MLS_PROMPT_FINGERPRINT ||
        header_bytes != compute_header_bytes(words, parts, meta)) {
        return mls_fail(st, MLS_E_FORMAT, "the lengths in a record's header are invalid");
    }
    out->header_bytes = header_bytes;
    if (header_bytes > bytes) {
        return mls_fail(st, MLS_E_CAPACITY, "the header is longer");
    }
    if (checksum_header(data, header_bytes, crc) != mls_load_le32(data + AT_CRC)) {
        return mls_fail(st, MLS_E_CHECKSUM, "the header of a record is damaged");
    }
    mls_prompt_header header;
    read_fields(data, &header);
    if (header.record_bytes > left || !sum_parts(&header) ||
        header.end < header.token_count || header.end > UINT32_MAX) {
        return mls_fail(st, MLS_E_FORMAT, "the lengths of a record are invalid");
    }
    *out = header;
    return MLS_OK;
}

/* ---- notes, heads of files ---- */

void mls_prompt_note_write(unsigned char *out, const mls_prompt_note *note)
{
    memcpy(out, note->key.bytes, MLS_PROMPT_KEY);
    mls_store_le32(out + 16, note->operation);
    mls_store_le32(out + 20, note->segment);
}

mls_prompt_note mls_prompt_note_read(const unsigned char *data)
{
    mls_prompt_note note = {.operation = mls_load_le32(data + 16),
                            .segment = mls_load_le32(data + 20)};
    memcpy(note.key.bytes, data, MLS_PROMPT_KEY);
    return note;
}

/* Offsets in the head of a file: the letters of its kind, then the version, the checksum,
 * the id of the log, and the number of the file. Its last 28 bytes are zeros, or a hint
 * that the checksum does not cover. */
enum {
    HEAD_VERSION = 8,
    HEAD_CRC = 12,
    HEAD_ID = 16,
    HEAD_NUMBER = 32,
    HEAD_CHECKED = 36
};

/* Return the checksum of a file's head without the checksum's bytes. */
static uint32_t checksum_head(const unsigned char *data, const mls_crc_kernels *crc)
{
    return crc->update(crc->update(0, data, HEAD_CRC), data + HEAD_ID,
                       HEAD_CHECKED - HEAD_ID);
}

/* Write the head of a file. The checksum is computed last; bytes that no field uses are
 * zeros. */
void mls_prompt_head_write(unsigned char *out, const char *letters,
                           const mls_prompt_head *head, const mls_crc_kernels *crc)
{
    memset(out, 0, MLS_PROMPT_FILE_HEAD);
    memcpy(out, letters, HEAD_VERSION);
    mls_store_le32(out + HEAD_VERSION, MLS_PROMPT_VERSION);
    memcpy(out + HEAD_ID, head->id, MLS_PROMPT_KEY);
    mls_store_le32(out + HEAD_NUMBER, head->number);
    mls_store_le32(out + HEAD_CRC, checksum_head(out, crc));
}

/* Parse and check the head of a file. A newer version is reported before the checksum,
 * which it may compute in another way. */
mls_code mls_prompt_head_parse(const unsigned char *data, const char *letters,
                               const mls_crc_kernels *crc, mls_prompt_head *out,
                               mls_status *st)
{
    if (memcmp(data, letters, HEAD_VERSION) != 0) {
        return mls_fail(st, MLS_E_FORMAT, "not a file of a prompt store");
    }
    const uint32_t version = mls_load_le32(data + HEAD_VERSION);
    if (version > MLS_PROMPT_VERSION) {
        mls_fail(st, MLS_E_FORMAT,
                 "version %u of the format of prompt stores is newer than this program, "
                 "which reads version %d: update mlstate",
                 (unsigned)version, MLS_PROMPT_VERSION);
        mls_status_expected(st, "%d", MLS_PROMPT_VERSION);
        return mls_status_got(st, "%u", (unsigned)version);
    }
    if (version == 0 || checksum_head(data, crc) != mls_load_le32(data + HEAD_CRC)) {
        return mls_fail(st, MLS_E_FORMAT, "the head of the file is damaged");
    }
    memcpy(out->id, data + HEAD_ID, MLS_PROMPT_KEY);
    out->number = mls_load_le32(data + HEAD_NUMBER);
    return MLS_OK;
}

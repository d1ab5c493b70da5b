/* crc32c_fold: checksums by carry-less multiplication, written once for any vector width.
 *
 * What was read is kept as a remainder of one vector: bytes that, in the place of the
 * last ones read, would give the same checksum.  To read on, it is moved to the next ones
 * (crc32c_constants.h) and added to them.  One lane would wait for its multiplication each
 * time, so four run side by side, each over bytes of its own; in the end each is moved to
 * where the last one stands.  The CRC instruction reduces the sum and takes what is left.
 *
 * Private to crc32c_avx2.c and crc32c_avx512.c, which include it after they have defined:
 *   TARGET, TARGET_INLINE   what lets a function use the instruction set
 *   vector                  the type of one register; WIDTH, its bytes
 *   load, store, store_past_cache   one register; the last wants an aligned address
 *   first4                  a vector of 4 bytes with zeros behind them
 *   constants               what `fold` wants for a move
 *   fold                    a remainder moved, and data added
 *   lane_size, by_vectors, by_pages   the moves that four_lanes needs
 */
#ifndef MLS_CRC32C_FOLD_H
#define MLS_CRC32C_FOLD_H

enum {
    PAGE = 4096, /* bytes that one lane of a block covers where lanes are pages */
    SHORT = 256  /* below, the CRC instruction is as quick */
};

/* What becomes of the bytes that are read; a constant wherever it is passed. */
typedef enum purpose { READ, COPY, COPY_PAST_CACHE } purpose;

/* A run and how far it was read; `to` is NULL where nothing is copied. */
typedef struct mls_crc_run {
    unsigned char *to;
    const unsigned char *from;
    size_t at, bytes;
} mls_crc_run;

/* The vector that lies `ahead` of the place reached. */
TARGET_INLINE vector take(const mls_crc_run *r, size_t ahead, purpose why)
{
    const size_t at = r->at + ahead;
    const vector data = load(r->from + at);
    if (why == COPY) {
        store(r->to + at, data);
    } else if (why == COPY_PAST_CACHE) {
        store_past_cache(r->to + at, data);
    }
    return data;
}

/* Whether so many bytes are left. */
TARGET_INLINE bool has(const mls_crc_run *r, size_t bytes)
{
    return r->bytes - r->at >= bytes;
}

/* Read blocks of four lanes for as long as they fit; from the remainder so far to that
 * of the whole.  It stands right before the first lane, which thus begins with a shorter
 * move; the others begin from nothing, which is the same wherever it is moved. */
TARGET_INLINE vector four_lanes(vector total, mls_crc_run *r, const lane_size *lane,
                                purpose why)
{
    const size_t size = mls_crc_powers[lane->past_one].bytes;
    const vector next = constants(by_vectors.past_one);
    const vector next_block = constants(lane->next_block);
    vector begin = next;
    vector a = total, b = first4(0), c = first4(0), d = first4(0);
    for (; has(r, 4 * size); r->at += 4 * size) {
        a = fold(a, begin, take(r, 0, why));
        b = fold(b, next_block, take(r, size, why));
        c = fold(c, next_block, take(r, 2 * size, why));
        d = fold(d, next_block, take(r, 3 * size, why));
        begin = next_block;
        for (size_t i = WIDTH; i < size; i += WIDTH) {
            a = fold(a, next, take(r, i, why));
            b = fold(b, next, take(r, size + i, why));
            c = fold(c, next, take(r, 2 * size + i, why));
            d = fold(d, next, take(r, 3 * size + i, why));
        }
    }
    d = fold(a, constants(lane->past_three), d);
    d = fold(b, constants(lane->past_two), d);
    return fold(c, constants(lane->past_one), d);
}

/* The checksum's register after a remainder. */
TARGET_INLINE uint32_t reduced(vector total)
{
    uint64_t words[WIDTH / 8];
    uint64_t crc = 0;
    store((unsigned char *)words, total);
    for (size_t i = 0; i < WIDTH / 8; i++) {
        crc = _mm_crc32_u64(crc, words[i]);
    }
    return (uint32_t)crc;
}

/* The whole vectors of a run that has at least one; the checksum so far counts as part of
 * the first 4 bytes.  A long run is read as four pages side by side: measured on an AMD
 * EPYC (Zen 3), 1.15 to 1.2 times as fast from memory as one stream.  Copies go straight
 * on: stores a page apart fall into the same few lines of the cache, and several streams
 * past the cache took 3 to 8 times as long there. */
TARGET_INLINE uint32_t whole_vectors(uint32_t crc, mls_crc_run *r, purpose why)
{
    vector total = added(first4(~crc), take(r, 0, why));
    r->at += WIDTH;
    if (why == READ && has(r, 4 * PAGE)) {
        total = four_lanes(total, r, &by_pages, why);
    }
    if (has(r, 4 * WIDTH)) {
        total = four_lanes(total, r, &by_vectors, why);
    }
    for (const vector next = constants(by_vectors.past_one); has(r, WIDTH);
         r->at += WIDTH) {
        total = fold(total, next, take(r, 0, why));
    }
    return ~reduced(total);
}

/* Bytes by the CRC instruction: a whole short run, and what alignment or vectors leave
 * over. */
TARGET_INLINE uint32_t few_bytes(uint32_t crc, mls_crc_run *r, size_t bytes, purpose why)
{
    const size_t at = r->at;
    r->at += bytes;
    return why == READ
               ? mls_crc_x86.update(crc, r->from + at, bytes)
               : mls_crc_x86.copy(crc, r->to + at, r->from + at, bytes, MLS_STORE_PLAIN);
}

/* Short runs would spend more on the reduction than they gain. */
TARGET_INLINE uint32_t checksum(uint32_t crc, mls_crc_run r, purpose why)
{
    if (why == COPY_PAST_CACHE) {
        const size_t head = (size_t)(-(uintptr_t)r.to & (WIDTH - 1));
        crc = few_bytes(crc, &r, head < r.bytes ? head : r.bytes, why);
    }
    if (has(&r, SHORT)) {
        crc = whole_vectors(crc, &r, why);
    }
    crc = few_bytes(crc, &r, r.bytes - r.at, why);
    if (why == COPY_PAST_CACHE) {
        _mm_sfence(); /* such stores are ordered by nothing else */
    }
    return crc;
}

/* Checksum alone. */
TARGET static uint32_t update_run(uint32_t crc, const void *data, size_t bytes)
{
    const mls_crc_run r = {.from = data, .bytes = bytes};
    return checksum(crc, r, READ);
}

/* Checksum and copy in one pass. */
TARGET static uint32_t copy_run(uint32_t crc, void *dst, const void *src, size_t bytes,
                                mls_store how)
{
    const mls_crc_run r = {.to = dst, .from = src, .bytes = bytes};
    return how == MLS_STORE_PLAIN ? checksum(crc, r, COPY)
                                  : checksum(crc, r, COPY_PAST_CACHE);
}

#endif

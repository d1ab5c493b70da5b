/* crc32c_clmul: CRC32C by carry-less multiplication (folding), for any vector width.
 *
 * The bytes read so far are represented by a remainder of one vector: a vector that has
 * the same checksum if it replaces the last vector read. To continue, the remainder is
 * moved to the next vector (crc32c_constants.h) and added to it. A single lane would wait
 * for each multiplication, so four lanes run in parallel, each over its own bytes. At the
 * end, each is moved to the position of the last one. The CRC instruction then reduces
 * the sum and handles the remaining bytes.
 *
 * Private to crc32c_avx2.c and crc32c_avx512.c, which must define before they include it:
 *   TARGET, TARGET_INLINE   attributes that allow the instruction set
 *   vector                  the type of one register; WIDTH, its bytes
 *   store_past_cache        store one register to an aligned address
 *   make_vector4            a vector of 4 bytes followed by zeros
 *   move_constants          the constants that fold_vector needs for a move
 *   fold_vector             move a remainder and add data
 *   by_vectors, by_pages    the moves that fold_lanes needs
 */
#ifndef MLS_CRC32C_CLMUL_H
#define MLS_CRC32C_CLMUL_H

enum {
    PAGE = 4096, /* bytes that one lane of a block covers if lanes are pages */
    SHORT = 256  /* the CRC instruction is as fast for fewer bytes */
};

/* What to do with the bytes read; always passed as a constant. */
typedef enum run_mode { READ, COPY, COPY_PAST_CACHE } run_mode;

/* A range of memory, and the position reached in it. */
typedef struct mls_crc_run {
    unsigned char *to; /* NULL: the bytes are not copied */
    const unsigned char *from;
    size_t at, bytes; /* bytes processed so far; all bytes */
} mls_crc_run;

/* Load or store one register at any address. */
TARGET_INLINE vector load(const unsigned char *src)
{
    vector value;
    memcpy(&value, src, sizeof value);
    return value;
}

TARGET_INLINE void store(unsigned char *dst, vector value)
{
    memcpy(dst, &value, sizeof value);
}

/* Load and return the vector `ahead` bytes after the position (`r->at`, which stays), and
 * store it if `mode` is a copy. */
TARGET_INLINE vector take_vector(const mls_crc_run *r, size_t ahead, run_mode mode)
{
    const size_t at = r->at + ahead;
    const vector data = load(r->from + at);
    if (mode == COPY) {
        store(r->to + at, data);
    } else if (mode == COPY_PAST_CACHE) {
        store_past_cache(r->to + at, data);
    }
    return data;
}

/* Return whether at least `bytes` bytes are left. */
TARGET_INLINE bool has_bytes(const mls_crc_run *r, size_t bytes)
{
    return r->bytes - r->at >= bytes;
}

/* Read blocks of four lanes as long as they fit; the move `lane->past_one` has the length
 * of a lane. Takes the remainder `total` so far and returns the remainder of everything
 * read.
 *
 * The remainder so far belongs to the vector just before the first lane, so the first
 * lane begins with a shorter move. The other lanes begin with zero, which any move leaves
 * zero.
 */
TARGET_INLINE vector fold_lanes(vector total, mls_crc_run *r, const mls_crc_lanes *lane,
                                run_mode mode)
{
    const size_t size = mls_crc_powers[lane->past_one].bytes;
    const vector next = move_constants(by_vectors.past_one);
    const vector next_block = move_constants(lane->next_block);
    vector begin = next;
    vector a = total, b = make_vector4(0), c = make_vector4(0), d = make_vector4(0);
    for (; has_bytes(r, 4 * size); r->at += 4 * size) {
        a = fold_vector(a, begin, take_vector(r, 0, mode));
        b = fold_vector(b, next_block, take_vector(r, size, mode));
        c = fold_vector(c, next_block, take_vector(r, 2 * size, mode));
        d = fold_vector(d, next_block, take_vector(r, 3 * size, mode));
        begin = next_block;
        for (size_t i = WIDTH; i < size; i += WIDTH) {
            a = fold_vector(a, next, take_vector(r, i, mode));
            b = fold_vector(b, next, take_vector(r, size + i, mode));
            c = fold_vector(c, next, take_vector(r, 2 * size + i, mode));
            d = fold_vector(d, next, take_vector(r, 3 * size + i, mode));
        }
    }
    d = fold_vector(a, move_constants(lane->past_three), d);
    d = fold_vector(b, move_constants(lane->past_two), d);
    return fold_vector(c, move_constants(lane->past_one), d);
}

/* Return the checksum register for a remainder, not inverted yet: the CRC instruction
 * divides it. */
TARGET_INLINE uint32_t reduce_vector(vector total)
{
    uint64_t words[WIDTH / 8];
    uint64_t crc = 0;
    store((unsigned char *)words, total);
    for (size_t i = 0; i < WIDTH / 8; i++) {
        crc = _mm_crc32_u64(crc, words[i]);
    }
    return (uint32_t)crc;
}

/* Continue the checksum over the whole vectors of a range that has at least one. The
 * checksum so far is added to the first 4 bytes.
 *
 * A long range is read as four parallel pages: on an AMD EPYC (Zen 3) this is 1.15 to 1.2
 * times as fast from memory as one stream. Copies use one stream: stores a page apart map
 * to the same few cache lines, and several non-temporal streams took 3 to 8 times as long
 * on that processor.
 */
TARGET_INLINE uint32_t checksum_vectors(uint32_t crc, mls_crc_run *r, run_mode mode)
{
    vector total = make_vector4(~crc) ^ take_vector(r, 0, mode);
    r->at += WIDTH;
    if (mode == READ && has_bytes(r, 4 * PAGE)) {
        total = fold_lanes(total, r, &by_pages, mode);
    }
    if (has_bytes(r, 4 * WIDTH)) {
        total = fold_lanes(total, r, &by_vectors, mode);
    }
    for (const vector next = move_constants(by_vectors.past_one); has_bytes(r, WIDTH);
         r->at += WIDTH) {
        total = fold_vector(total, next, take_vector(r, 0, mode));
    }
    return ~reduce_vector(total);
}

/* Continue the checksum over the next `bytes` bytes with the CRC instruction: for a short
 * range, and for the bytes before alignment and after the last vector. */
TARGET_INLINE uint32_t checksum_bytes(uint32_t crc, mls_crc_run *r, size_t bytes,
                                      run_mode mode)
{
    const size_t at = r->at;
    r->at += bytes;
    return mode == READ
               ? mls_crc_x86.update(crc, r->from + at, bytes)
               : mls_crc_x86.copy(crc, r->to + at, r->from + at, bytes, MLS_STORE_CACHED);
}

/* Continue the checksum over a whole run. For short ranges the reduction costs more than
 * folding saves, so they use the CRC instruction only. */
TARGET_INLINE uint32_t checksum_range(uint32_t crc, mls_crc_run r, run_mode mode)
{
    if (mode == COPY_PAST_CACHE) {
        /* bytes before the first aligned address of the destination */
        const size_t head = (size_t)(-(uintptr_t)r.to & (WIDTH - 1));
        crc = checksum_bytes(crc, &r, head < r.bytes ? head : r.bytes, mode);
    }
    if (has_bytes(&r, SHORT)) {
        crc = checksum_vectors(crc, &r, mode);
    }
    crc = checksum_bytes(crc, &r, r.bytes - r.at, mode);
    if (mode == COPY_PAST_CACHE) {
        _mm_sfence(); /* nothing else orders non-temporal stores */
    }
    return crc;
}

/* `update` of the table that includes this file. */
TARGET static uint32_t update_run(uint32_t crc, const void *data, size_t bytes)
{
    const mls_crc_run r = {.from = data, .bytes = bytes};
    return checksum_range(crc, r, READ);
}

/* `copy` of the table. The two calls differ so that the mode is a constant in each. */
TARGET static uint32_t copy_run(uint32_t crc, void *dst, const void *src, size_t bytes,
                                mls_store how)
{
    const mls_crc_run r = {.to = dst, .from = src, .bytes = bytes};
    return how != MLS_STORE_STREAM ? checksum_range(crc, r, COPY)
                                   : checksum_range(crc, r, COPY_PAST_CACHE);
}

#endif

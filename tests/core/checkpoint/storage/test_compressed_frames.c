/* Frames: encoded, stored, and read again with and without checksums; and invalid
 * frames. */
#include "checkpoint/storage/compressed_frames.h"
#include "safetensors/safetensors.h"
#include "support/shards.h"
#include "support/toy_codec.h"

enum { FRAME = MLS_FRAME_BYTES, BLOCK = MLS_SAFETENSORS_BLOCK, OFFSET = 513 };

/* ---- texts ---- */

static bool reads_as(const char *chars, size_t bytes, const size_t *ends)
{
    size_t got[8] = {0};
    mls_compressed_frames frames = {.item = 1, .bytes = bytes, .ends = got};
    const size_t count = mls_compressed_frames_count(bytes);
    /* as an index does: count first, to allocate the memory */
    return mls_compressed_frames_text_count(text(chars)) == count &&
           mls_compressed_frames_read(&frames, text(chars)) &&
           (ends == NULL || memcmp(got, ends, count * sizeof *ends) == 0);
}

TEST(frame_lengths_become_end_offsets)
{
    static const size_t ends[] = {812, 812 + FRAME, 813 + FRAME};
    CHECK(reads_as("812,1048576,1", 2 * FRAME + 1, ends));
    CHECK(reads_as("1", 1, NULL) && reads_as("16", 16, NULL));
    CHECK(mls_compressed_frames_count(0) == 0 && mls_compressed_frames_count(1) == 1);
    CHECK(mls_compressed_frames_count(FRAME) == 1 &&
          mls_compressed_frames_count(FRAME + 1) == 2);
    CHECK(mls_compressed_frames_count(SIZE_MAX) == SIZE_MAX / FRAME + 1);
    size_t list[] = {812, 812 + FRAME, 813 + FRAME};
    const mls_compressed_frames frames = {
        .item = 1, .bytes = 2 * FRAME + 1, .ends = list};
    CHECK(mls_compressed_frame_bytes(&frames, 0) == FRAME &&
          mls_compressed_frame_bytes(&frames, 2) == 1);
    CHECK(mls_compressed_frame_begin(&frames, 0) == 0 &&
          mls_compressed_frame_begin(&frames, 2) == ends[1]);
    CHECK_TEXT(mls_codec_name(MLS_ZLIB), "zlib");
    CHECK_TEXT(mls_codec_name(MLS_ZSTD), "zstd");
}

TEST(malformed_frame_lengths_are_refused)
{
    static const char *const bad[] = {"",
                                      "5",
                                      "5,5,5",
                                      "5,5,",
                                      "5,5 ",
                                      "0,5",
                                      "5,0",
                                      "5,101",
                                      "1048577,5",
                                      "-1,5",
                                      "5, 5",
                                      "05,5",
                                      "1e3,5.0",
                                      ",",
                                      ",,,",
                                      "18446744073709551617,5",
                                      "18446744073709551615,2"};
    CHECK(reads_as("5,5", FRAME + 100, NULL) &&
          reads_as("1048576,100", FRAME + 100, NULL));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (reads_as(bad[i], FRAME + 100, NULL)) {
            printf("    '%s'\n", bad[i]);
            CHECK(false && "it was read");
        }
    }
    /* a NUL is an ordinary byte */
    size_t ends[2];
    mls_compressed_frames frames = {.item = 1, .bytes = FRAME + 100, .ends = ends};
    CHECK(!mls_compressed_frames_read(&frames, (mls_str){"5,5\0", 4}));
    CHECK(!mls_compressed_frames_read(&frames, (mls_str){"5\0,5", 4}));
}

/* ---- files ---- */

enum { FRAMES_MOST = 8 };

/* The data of a layer: compressed bytes in a file, after some others. */
typedef struct stored {
    toy codec;
    unsigned char *data; /* before compression; borrowed */
    mls_compressed_frames frames;
    size_t ends[FRAMES_MOST];
    uint32_t crcs[FRAMES_MOST + 1];
    mls_coded coded;
} stored;

/* Compute the checksums of the compressed bytes. */
static void take_checksums(stored *s, const unsigned char *coded, size_t bytes)
{
    for (size_t at = 0, i = 0; at < bytes; at += BLOCK) {
        s->crcs[i++] =
            crc->update(0, coded + at, bytes - at < BLOCK ? bytes - at : BLOCK);
    }
}

static bool store(stored *s, unsigned char *data, size_t bytes, size_t item)
{
    unsigned char *to = malloc(bytes), *apart = malloc(FRAME);
    size_t end = 0;
    bool good = to != NULL && apart != NULL;
    mls_status st;
    *s = (stored){.data = data,
                  .frames = {.codec = MLS_ZSTD, .item = item, .bytes = bytes}};
    toy_begin(&s->codec);
    s->frames.ends = s->ends;
    for (size_t i = 0; good && i < mls_compressed_frames_count(bytes); i++) {
        const size_t length = mls_compressed_frame_bytes(&s->frames, i);
        size_t coded = 0;
        good = mls_compressed_frame_encode(&s->codec.codecs, MLS_ZSTD, item,
                                           data + i * FRAME, length, apart, to + end,
                                           &coded, &st) == MLS_OK &&
               coded > 0 && coded <= length;
        end += coded;
        s->ends[i] = end;
    }
    (void)unlinkat(pool_fd, "params/x", 0);
    const int fd = openat(pool_fd, "params/x", O_RDWR | O_CREAT, 0600);
    good = good && fd >= 0 && mls_file_write_at(fd, to, end, OFFSET, &st) == MLS_OK;
    if (good) {
        take_checksums(s, to, end);
    }
    s->coded = (mls_coded){.source = {.fd = fd},
                           .offset = OFFSET,
                           .bytes = end,
                           .crcs = s->crcs,
                           .frames = &s->frames,
                           .crc = crc,
                           .codecs = &s->codec.codecs};
    free(to);
    free(apart);
    return good;
}

static void drop(stored *s)
{
    (void)close(s->coded.source.fd);
    s->coded.source.fd = -1;
    (void)unlinkat(pool_fd, "params/x", 0);
}

/* Whether one frame decodes to the original bytes. */
static bool is_frame(mls_compressed_frame_reader *reader, const stored *s, size_t number)
{
    mls_status st;
    const unsigned char *data = NULL;
    const mls_code code =
        mls_compressed_frame_read(reader, &s->coded, number, &data, &st);
    if (code != MLS_OK) {
        printf("    frame %zu: %s\n", number, st.text);
        return false;
    }
    return memcmp(data, s->data + number * FRAME,
                  mls_compressed_frame_bytes(&s->frames, number)) == 0;
}

/* In order, in reverse, and in a mixed order. */
static bool all_frames_are_good(const stored *s)
{
    const size_t count = mls_compressed_frames_count(s->frames.bytes);
    mls_compressed_frame_reader reader = {0};
    bool good = true;
    for (size_t i = 0; i < count; i++) {
        good = is_frame(&reader, s, i) && good;
    }
    for (size_t i = count; i-- > 0;) {
        good = is_frame(&reader, s, i) && is_frame(&reader, s, i) && good;
    }
    for (size_t i = 0; i < 6; i++) {
        good = is_frame(&reader, s, i * 7 % 5 % count) && good;
    }
    mls_compressed_frame_reader_fini(&reader);
    return good && reader.buffer == NULL && reader.crcs == NULL;
}

/* Content of a `kind`: compressible, straddling blocks, or stored uncompressed. */
static void fill(unsigned char *data, size_t bytes, size_t item, int kind)
{
    static const size_t fifths[] = {2, 1, 1, 3, 0}; /* of noise in each frame */
    unsigned char *random = noise(bytes);
    for (size_t i = 0; random != NULL && i < bytes; i++) {
        const size_t frame = i / FRAME, in = i % FRAME, element = i / item;
        const size_t digit = i % item < 4 ? i % item : 4;
        const unsigned char counted = (unsigned char)(element >> 3 >> 8 * digit);
        data[i] = kind == 0   ? 7
                  : kind == 1 ? random[i]
                  : kind == 2 ? counted
                  /* some noise in each frame: compressed lengths of all kinds */
                  : kind == 3
                      ? (unsigned char)(in < FRAME / 5 * fifths[frame] ? random[i] : 3)
                      : (unsigned char)(frame % 2 == 0 ? random[i] : 9);
    }
    free(random);
}

/* ---- of the current test ---- */

static unsigned char *data; /* five frames */
static stored s;
static mls_compressed_frame_reader reader;

BEFORE_EACH
{
    data = malloc(5 * FRAME);
    s = (stored){.coded.source.fd = -1};
    REQUIRE(data != NULL);
}

AFTER_EACH
{
    mls_compressed_frame_reader_fini(&reader);
    drop(&s);
    free(data);
}

TEST(compressed_frames_round_trip)
{
    static const size_t items[] = {1, 2, 4, 8};
    static const size_t sizes[] = {16, 1008, FRAME, FRAME + 16, 4 * FRAME + 4096};
    for (size_t i = 0; i < 4 * 5 * 5; i++) {
        const size_t item = items[i % 4], bytes = sizes[i / 4 % 5];
        if (bytes > 2 * FRAME && i % 4 != i / 20 % 4 && i % 4 != (i / 20 + 2) % 4) {
            continue; /* for large sizes two of the four items suffice */
        }
        fill(data, bytes, item, (int)(i / 20));
        REQUIRE(store(&s, data, bytes, item));
        CHECK(i / 20 != 1 || s.coded.bytes == bytes); /* noise is stored uncompressed, */
        CHECK(i / 20 != 0 ||
              s.coded.bytes <= bytes / 64 + 2); /* and repetitions are compressed */
        CHECK(i / 20 != 2 || bytes < FRAME || s.coded.bytes <= bytes / 4 * 3);
        CHECK(all_frames_are_good(&s));
        s.coded.crc = NULL;
        s.coded.crcs = NULL;
        CHECK(all_frames_are_good(&s));
        drop(&s);
    }
}

/* A frame of one byte cannot become shorter. */
TEST(smallest_frames_round_trip)
{
    memset(data, 5, 3);
    for (size_t bytes = 1; bytes <= 3; bytes++) {
        REQUIRE(store(&s, data, bytes, 1));
        CHECK(s.coded.bytes == (bytes == 3 ? 2 : bytes) && all_frames_are_good(&s));
        drop(&s);
    }
}

/* Five frames in one block: after the first read the file is not needed. */
TEST(each_block_is_read_once)
{
    unsigned char *zeros = calloc(1, BLOCK);
    REQUIRE(zeros != NULL);
    fill(data, 5 * FRAME, 4, 0);
    REQUIRE(store(&s, data, 5 * FRAME, 4) && s.coded.bytes < BLOCK);
    CHECK(is_frame(&reader, &s, 0));
    REQUIRE(mls_file_write_at(s.coded.source.fd, zeros, BLOCK, OFFSET, &status) ==
            MLS_OK);
    for (size_t i = 1; i < 5; i++) {
        CHECK(is_frame(&reader, &s, i));
    }
    mls_compressed_frame_reader_fini(&reader);
    drop(&s);
    /* the same with two blocks: the second one is kept for the next frame */
    fill(data, 5 * FRAME, 1, 3);
    REQUIRE(store(&s, data, 5 * FRAME, 1));
    REQUIRE(mls_compressed_frame_begin(&s.frames, 1) < BLOCK && s.ends[1] > BLOCK);
    REQUIRE(s.ends[2] < 2 * BLOCK);
    CHECK(is_frame(&reader, &s, 1));
    REQUIRE(mls_file_write_at(s.coded.source.fd, zeros, BLOCK, OFFSET, &status) ==
            MLS_OK);
    CHECK(is_frame(&reader, &s, 2));
    free(zeros);
}

/* One reader for two layers: a block of one is never used for the other. */
TEST(block_cache_is_keyed_by_overlay)
{
    unsigned char *a = malloc(2 * FRAME), *b = malloc(2 * FRAME);
    stored first, second;
    REQUIRE(a != NULL && b != NULL);
    fill(a, 2 * FRAME, 2, 0);
    fill(b, 2 * FRAME, 2, 2);
    REQUIRE(store(&first, a, 2 * FRAME, 2) && store(&second, b, 2 * FRAME, 2));
    for (size_t i = 0; i < 4; i++) {
        CHECK(is_frame(&reader, &first, i % 2) && is_frame(&reader, &second, i % 2));
    }
    first.coded.crc = NULL; /* and an unverified block is never used as a verified one */
    CHECK(is_frame(&reader, &second, 0) && is_frame(&reader, &first, 0) &&
          is_frame(&reader, &second, 1));
    mls_compressed_frame_reader_fini(&reader);
    drop(&first);
    drop(&second);
    free(a);
    free(b);
}

/* ---- damage ---- */

static mls_code read_one(size_t number)
{
    const unsigned char *frame;
    mls_status_clear(&status);
    return mls_compressed_frame_read(&reader, &s.coded, number, &frame, &status);
}

static bool flip_stored(size_t at)
{
    return flip("params/x", OFFSET + at, 0x20);
}

TEST(damaged_blocks_are_reported)
{
    fill(data, 5 * FRAME, 2, 4); /* noise in 0, 2, 4: block boundaries are within it */
    REQUIRE(store(&s, data, 5 * FRAME, 2));
    for (size_t at = 0; at < s.coded.bytes; at += BLOCK / 3 + 1) {
        const size_t block = at / BLOCK;
        REQUIRE(flip_stored(at));
        for (size_t i = 0; i < 5; i++) {
            const bool bad = mls_compressed_frame_begin(&s.frames, i) / BLOCK <= block &&
                             (s.ends[i] - 1) / BLOCK >= block;
            mls_compressed_frame_reader_fini(&reader);
            CHECK(read_one(i) == (bad ? MLS_E_CHECKSUM : MLS_OK));
            CHECK(!bad || (status.has_offset && status.offset == OFFSET + block * BLOCK));
            CHECK(!bad || (strlen(status.expected) == 8 && strlen(status.got) == 8));
        }
        REQUIRE(flip_stored(at));        /* undo the change */
        for (size_t i = 0; i < 5; i++) { /* no damaged block was kept in the reader */
            CHECK(is_frame(&reader, &s, i));
        }
    }
}

/* Without checksums only the codec can notice damage. */
TEST(unverified_damage_reaches_the_codec)
{
    fill(data, 2 * FRAME, 4, 0);
    REQUIRE(store(&s, data, 2 * FRAME, 4));
    s.coded.crc = NULL;
    REQUIRE(flip_stored(s.ends[0])); /* the count of a repeated byte */
    CHECK(read_one(0) == MLS_OK);
    CHECK(read_one(1) == MLS_E_FORMAT);
    CHECK(status.has_offset && status.offset == OFFSET + s.ends[0]);
}

TEST(truncated_files_are_refused)
{
    fill(data, 2 * FRAME, 4, 1);
    REQUIRE(store(&s, data, 2 * FRAME, 4));
    REQUIRE(set_length("params/x", OFFSET + FRAME + 10));
    for (int verified = 0; verified < 2; verified++) {
        s.coded.crc = verified ? crc : NULL;
        CHECK(read_one(1) == MLS_E_FORMAT);
        CHECK(is_frame(&reader, &s, 0));
    }
}

TEST(codec_errors_are_returned)
{
    static const mls_code codes[] = {MLS_E_FORMAT, MLS_E_MEMORY, MLS_E_VALUE,
                                     MLS_E_STOPPED};
    unsigned char *rooms = malloc(2 * FRAME);
    REQUIRE(rooms != NULL);
    fill(data, FRAME, 8, 2);
    REQUIRE(store(&s, data, FRAME, 8));
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        size_t out = 77;
        s.codec.encode_fails_at = s.codec.decode_fails_at = 1;
        s.codec.failure = codes[i];
        CHECK(read_one(0) == codes[i]);
        CHECK_TEXT(status.text, "zstd is broken");
        CHECK(status.has_offset == (codes[i] == MLS_E_FORMAT));
        CHECK(mls_compressed_frame_encode(&s.codec.codecs, MLS_ZLIB, 8, data, FRAME,
                                          rooms, rooms + FRAME, &out,
                                          &status) == codes[i]);
        CHECK_TEXT(status.text, "zlib is broken");
        CHECK(out == 77);
        s.codec.decode_fails_at = 0;
        CHECK(is_frame(&reader, &s, 0));
    }
    free(rooms);
}

TEST(without_codecs_only_raw_frames_are_read)
{
    fill(data, 5 * FRAME, 4, 4);
    REQUIRE(store(&s, data, 5 * FRAME, 4));
    s.coded.codecs = NULL;
    for (size_t i = 0; i < 5; i++) {
        if (i % 2 == 0) {
            CHECK(is_frame(&reader, &s, i));
        } else {
            CHECK(read_one(i) == MLS_E_VALUE);
            CHECK_TEXT(status.text, "no decoder for zstd is available");
        }
    }
}

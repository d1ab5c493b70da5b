/* Parts of shards, read from files: stored in one layout, requested in another. */
#include "checkpoint/read/shard_read.h"
#include "safetensors/safetensors.h"
#include "support/parts.h"
#include "support/shards.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    BLOCK = MLS_SAFETENSORS_BLOCK,
    ELEMENTS = 60, /* elements of the tensor that is stored in many layouts */
    PARTS = 16,    /* at most, in its layouts */
    PAYLOAD = 4096
};

/* ---- pread and preadv, which misbehave on request ---- */

static size_t short_reads;        /* unless 0, no call returns more */
static atomic_int interrupted;    /* the number of calls to interrupt first */
static atomic_int cut_after = -1; /* calls until `cut_file` is truncated */
static atomic_int calls;          /* of either function */
static uintptr_t last_place; /* address of the last call; for tests with one thread */
static bool notes_place;
static char cut_file[200];

ssize_t pread(int fd, void *data, size_t bytes, off_t offset);
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset);

/* Each reader has its own descriptor, so the file position may change. */
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset)
{
    atomic_fetch_add(&calls, 1);
    if (notes_place) {
        last_place = (uintptr_t)parts->iov_base;
    }
    if (atomic_load(&interrupted) > 0 && atomic_fetch_sub(&interrupted, 1) > 0) {
        errno = EINTR;
        return -1;
    }
    if (atomic_load(&cut_after) >= 0 && atomic_fetch_sub(&cut_after, 1) == 0 &&
        truncate(cut_file, PAYLOAD + 100) != 0) {
        return -1;
    }
    const bool shorter = short_reads > 0 && parts->iov_len > short_reads;
    const struct iovec part = {.iov_base = parts->iov_base, .iov_len = short_reads};
    return lseek(fd, offset, SEEK_SET) < 0 ? -1
           : shorter                       ? readv(fd, &part, 1)
                                           : readv(fd, parts, count);
}

ssize_t pread(int fd, void *data, size_t bytes, off_t offset)
{
    const struct iovec place = {.iov_base = data, .iov_len = bytes};
    return preadv(fd, &place, 1, offset);
}

/* ---- shards, each with a file in the pool ---- */

/* Write `bytes` bytes into a file at `offset`; creates the file if necessary. */
static bool put(const char *file, const void *data, size_t bytes, uint64_t offset)
{
    const int fd = openat(pool_fd, file, O_WRONLY | O_CREAT, 0600);
    const bool good = fd >= 0 && pwrite(fd, data, bytes, (off_t)offset) == (ssize_t)bytes;
    return (fd < 0 || close(fd) == 0) && good;
}

static uint32_t *checksums(const unsigned char *data, size_t bytes)
{
    const size_t blocks = (bytes + BLOCK - 1) / BLOCK;
    uint32_t *crcs = malloc((blocks + 1) * sizeof *crcs);
    for (size_t i = 0; crcs != NULL && i < blocks; i++) {
        const size_t left = bytes - i * BLOCK;
        crcs[i] = crc->update(0, data + i * BLOCK, left < BLOCK ? left : BLOCK);
    }
    return crcs;
}

static mls_part flat_part(size_t total, size_t begin, size_t end)
{
    return (mls_part){
        .rank = 1, .length = {total}, .begin = begin, .end = end, .flat = true};
}

/* A one-dimensional shard of all of `data`, in its own file. */
static mls_stored_shard store(const char *file, const unsigned char *data, size_t bytes)
{
    mls_part *part = malloc(sizeof *part);
    const mls_stored_shard shard = {.file = file,
                                    .file_bytes = PAYLOAD + bytes,
                                    .offset = PAYLOAD,
                                    .item_bytes = 1,
                                    .part = part,
                                    .crcs = checksums(data, bytes),
                                    .name = text("weight")};
    if (part != NULL) {
        *part = flat_part(bytes, 0, bytes);
    }
    CHECK(part != NULL && shard.crcs != NULL && put(file, data, bytes, PAYLOAD));
    return shard;
}

static void drop(mls_stored_shard *shard)
{
    (void)unlinkat(pool_fd, shard->file, 0);
    free((void *)(uintptr_t)shard->crcs);
    free((void *)(uintptr_t)shard->part);
}

/* A request to read pieces of the folder and check their checksums, with the pool's
 * threads. */
static mls_read_request request_of(const mls_read_piece *pieces, size_t count,
                                   mls_pool *pool)
{
    return (mls_read_request){
        .folder = pool_fd, .pieces = pieces, .count = count, .crc = crc, .pool = pool};
}

/* Read one piece on the calling thread only. */
static mls_code read_one(const mls_stored_shard *shard, const mls_part *to, void *data,
                         bool verify, mls_status *st)
{
    const mls_read_piece piece = {.shard = shard, .to = to, .data = data};
    size_t failed = 99;
    const int before = next_descriptor();
    mls_read_request request = request_of(&piece, 1, NULL);
    request.crc = verify ? crc : NULL;
    const mls_code code = mls_shards_read(&request, &failed, st);
    CHECK(failed == (code == MLS_OK ? 99U : 0U));
    CHECK(next_descriptor() == before); /* no file stayed open */
    return code;
}

/* ---- conversion between layouts ---- */

static const size_t shape[] = {5, 4, 3};

static size_t layouts(mls_layout *out)
{
    size_t count = 0;
    out[count++] = (mls_layout){0};
    for (int axis = MLS_LAYOUT_FLAT; axis < 3; axis++) {
        for (size_t parts = 2; parts <= 7; parts += 5) {
            out[count++] = cut(axis, parts);
        }
        for (int then = MLS_LAYOUT_FLAT; axis >= 0 && then < 3; then++) {
            out[count++] = cut_twice(axis, 2, then, 2);
        }
    }
    out[count++] = (mls_layout){.count = 3, .steps = {{2, 2}, {0, 2}, {0, 2}}};
    return count;
}

/* Pack the elements of a part into `out`; returns their number. */
static size_t pack(const mls_part *part, const unsigned char *tensor, size_t item,
                   unsigned char *out)
{
    size_t elements[ELEMENTS];
    const size_t count = elements_of(part, shape, elements);
    for (size_t i = 0; i < count; i++) {
        memcpy(out + i * item, tensor + elements[i] * item, item);
    }
    return count;
}

/* A tensor with all its parts stored, in two files. */
typedef struct stored_tensor {
    size_t item, count;
    unsigned char *bytes;
    mls_stored_shard shards[PARTS];
    mls_part targets[PARTS];
    unsigned char *places[PARTS];
    mls_read_piece pieces[PARTS * PARTS];
} stored_tensor;

static void store_parts(stored_tensor *t, mls_layout layout)
{
    static const char *const files[] = {"even", "odd"};
    uint64_t ends[2] = {PAYLOAD, PAYLOAD};
    unsigned char *packed = malloc(ELEMENTS * t->item);
    t->count = parts_of(layout);
    CHECK(t->count <= PARTS);
    for (size_t i = 0; i < t->count; i++) {
        mls_stored_shard *s = &t->shards[i];
        *s = (mls_stored_shard){.file = files[i % 2],
                                .offset = ends[i % 2],
                                .item_bytes = t->item,
                                .name = text("w")};
        mls_part *part = malloc(sizeof *part);
        REQUIRE(part != NULL);
        *part = part_at(layout, 3, shape, i);
        s->part = part;
        const size_t bytes = pack(part, t->bytes, t->item, packed) * t->item;
        s->crcs = checksums(packed, bytes);
        CHECK(put(s->file, packed, bytes, s->offset));
        ends[i % 2] += bytes;
    }
    for (size_t i = 0; i < t->count; i++) {
        t->shards[i].file_bytes = ends[i % 2];
        CHECK(set_length(t->shards[i].file, ends[i % 2]));
    }
    free(packed);
}

/* Read all parts of `layout` and compare each with its definition. */
static void read_parts(stored_tensor *t, mls_layout layout, bool verify, mls_pool *pool)
{
    mls_status st;
    const size_t parts = parts_of(layout);
    size_t pieces = 0, failed;
    CHECK(parts <= PARTS);
    unsigned char *expected = malloc(ELEMENTS * t->item);
    for (size_t i = 0; i < parts; i++) {
        t->targets[i] = part_at(layout, 3, shape, i);
        t->places[i] = malloc(mls_part_count(&t->targets[i]) * t->item + 1);
        for (size_t j = 0; j < t->count; j++) {
            t->pieces[pieces++] = (mls_read_piece){
                .shard = &t->shards[j], .to = &t->targets[i], .data = t->places[i]};
        }
    }
    mls_read_request request = request_of(t->pieces, pieces, pool);
    request.crc = verify ? crc : NULL;
    CHECK(mls_shards_read(&request, &failed, &st) == MLS_OK);
    for (size_t i = 0; i < parts; i++) {
        const size_t bytes = pack(&t->targets[i], t->bytes, t->item, expected) * t->item;
        CHECK(memcmp(t->places[i], expected, bytes) == 0);
        free(t->places[i]);
    }
    free(expected);
}

/* All pairs of layouts from the `first` on, every `step`-th. */
static void convert(size_t item, size_t first, size_t step, size_t threads)
{
    mls_layout all[64];
    const size_t count = layouts(all);
    stored_tensor *t = calloc(1, sizeof *t);
    mls_pool *pool = NULL;
    mls_status st;
    REQUIRE(t != NULL && mls_pool_new(threads, &pool, &st) == MLS_OK);
    t->item = item;
    t->bytes = noise(ELEMENTS * item);
    for (size_t i = 0; i < count; i++) {
        store_parts(t, all[i]);
        for (size_t j = (first + i) % step; j < count; j += step) {
            read_parts(t, all[j], false, pool);
            read_parts(t, all[j], true, pool);
        }
        for (size_t part = 0; part < t->count; part++) {
            drop(&t->shards[part]);
        }
    }
    mls_pool_free(pool);
    free(t->bytes);
    free(t);
}

TEST(every_layout_converts_to_every_other)
{
    convert(4, 0, 1, 1);
}

TEST(elements_crossing_block_ends_are_read)
{
    /* about 8 blocks in all, and no element is aligned to a block or a step */
    convert(150001, 0, 11, 1);
}

/* A destination less than a cache line ahead of the file offset, modulo 4 KiB. */
TEST(page_aliased_copies_use_a_buffer)
{
    enum { BYTES = 700001, PAGE = 4096 };
    static const struct {
        size_t ahead;
        bool straight;
    } cases[] = {{0, true},  {1, false},   {16, false},     {63, false},
                 {64, true}, {2048, true}, {PAGE - 1, true}};
    unsigned char *data = noise(BYTES), *memory = malloc(BYTES + 2 * (size_t)PAGE);
    REQUIRE(data != NULL && memory != NULL);
    mls_stored_shard shard = store("file", data, BYTES);
    unsigned char *page = memory + (PAGE - (uintptr_t)memory % PAGE);
    notes_place = true;
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        unsigned char *place = page + cases[i / 2].ahead;
        memset(place, 0, BYTES);
        CHECK(read_one(&shard, shard.part, place, i % 2 == 0, &status) == MLS_OK);
        CHECK(memcmp(place, data, BYTES) == 0);
        CHECK((last_place - (uintptr_t)place < BYTES) == cases[i / 2].straight);
    }
    notes_place = false;
    drop(&shard);
    free(memory);
    free(data);
}

TEST(several_threads_read_like_one_thread)
{
    convert(150001, 3, 11, 4);
}

TEST(short_and_interrupted_reads_are_continued)
{
    short_reads = 70001;
    atomic_store(&interrupted, 50);
    convert(150001, 5, 19, 4);
    short_reads = 0;
    CHECK(atomic_load(&interrupted) <= 0);
}

/* ---- many small pieces ---- */

enum { SMALL = 1200, SMALL_BYTES = 6000 };

/* Consecutive shards in three files, requested in a mixed order. */
typedef struct crowd {
    mls_stored_shard segments[3], shards[SMALL];
    mls_part part; /* of each small shard */
    mls_read_piece pieces[SMALL];
    unsigned char *data, *got;
} crowd;

static crowd *crowd_new(void)
{
    static const char *const files[] = {"segment-a", "segment-b", "segment-c"};
    const size_t each = (size_t)(SMALL / 3) * SMALL_BYTES;
    crowd *c = calloc(1, sizeof *c);
    CHECK(c != NULL);
    c->data = noise(3 * each);
    c->got = calloc(3, each);
    c->part = flat_part(SMALL_BYTES, 0, SMALL_BYTES);
    for (size_t i = 0; i < 3; i++) {
        c->segments[i] = store(files[i], c->data + i * each, each);
    }
    for (size_t i = 0; i < SMALL; i++) {
        const size_t at = i * 7 % SMALL; /* 7 and SMALL have no common factor */
        const unsigned char *bytes = c->data + at * SMALL_BYTES;
        mls_stored_shard *s = &c->shards[i];
        *s = c->segments[at / (SMALL / 3)];
        s->offset += at % (SMALL / 3) * SMALL_BYTES;
        s->part = &c->part;
        s->crcs = checksums(bytes, SMALL_BYTES);
        c->pieces[i] = (mls_read_piece){
            .shard = s, .to = &c->part, .data = c->got + at * SMALL_BYTES};
    }
    return c;
}

static void crowd_free(crowd *c)
{
    for (size_t i = 0; i < SMALL; i++) {
        free((void *)(uintptr_t)c->shards[i].crcs);
    }
    for (size_t i = 0; i < 3; i++) {
        drop(&c->segments[i]);
    }
    free(c->data);
    free(c->got);
    free(c);
}

TEST(many_small_pieces_share_few_files)
{
    crowd *c = crowd_new();
    size_t failed;
    for (int i = 0; i < 4; i++) {
        const bool verify = i % 2 == 1;
        watcher seen = {.allowed = 1 << 30};
        const mls_progress progress = {.report = watch, .context = &seen};
        memset(c->got, 0, SMALL * SMALL_BYTES);
        short_reads = i < 2 ? 0 : SMALL_BYTES / 2; /* then one by one */
        atomic_store(&calls, 0);
        mls_read_request request = request_of(c->pieces, SMALL, four_threads);
        request.crc = verify ? crc : NULL;
        request.progress = &progress;
        CHECK(mls_shards_read(&request, &failed, &status) == MLS_OK);
        CHECK(memcmp(c->got, c->data, SMALL * SMALL_BYTES) == 0);
        CHECK(atomic_load(&seen.bytes) == SMALL * SMALL_BYTES);
        CHECK(atomic_load(&seen.calls) < 50); /* not one for each piece */
        CHECK(short_reads > 0 || atomic_load(&calls) < SMALL / 10);
    }
    short_reads = 0;
    crowd_free(c);
}

TEST(the_first_damaged_piece_is_reported)
{
    crowd *c = crowd_new();
    for (size_t round = 0; round < 5; round++) {
        size_t failed = SMALL;
        for (size_t i = 900; i > 300; i -= 100 + round) {
            *(uint32_t *)(uintptr_t)c->shards[i].crcs ^= 1U;
        }
        size_t first = 0;
        while (crc->update(0, c->data + first * 7 % SMALL * SMALL_BYTES, SMALL_BYTES) ==
               c->shards[first].crcs[0]) {
            first++;
        }
        mls_read_request request = request_of(c->pieces, SMALL, four_threads);
        CHECK(mls_shards_read(&request, &failed, &status) == MLS_E_CHECKSUM);
        CHECK(failed == first && status.has_offset);
        CHECK(status.offset == c->shards[first].offset);
    }
    crowd_free(c);
}

TEST(progress_stops_the_work)
{
    crowd *c = crowd_new();
    for (int allowed = 1; allowed <= 3; allowed++) {
        watcher seen = {.allowed = allowed};
        const mls_progress progress = {.report = watch, .context = &seen};
        size_t failed = SMALL;
        mls_read_request request =
            request_of(c->pieces, SMALL, allowed < 3 ? NULL : four_threads);
        request.progress = &progress;
        CHECK(mls_shards_read(&request, &failed, &status) == MLS_E_STOPPED);
        CHECK(status.code == MLS_E_STOPPED && failed < SMALL);
        CHECK_TEXT(status.name, "weight");
        CHECK(atomic_load(&seen.calls) < allowed + 4);
        CHECK(allowed >= 3 || atomic_load(&seen.bytes) < SMALL * SMALL_BYTES);
    }
    crowd_free(c);
}

/* ---- destinations that are allocated during the read ---- */

/* The pieces of a crowd without destinations, and the number of those allocated. */
typedef struct place_maker {
    mls_read_piece pieces[SMALL];
    unsigned char *places[SMALL];
    size_t allowed;
    bool waits; /* pauses half way until a read has happened */
    int early;  /* calls of pread and preadv before all destinations were allocated */
} place_maker;

static bool make_places(void *context, mls_ready_counter *ready)
{
    place_maker *m = context;
    for (size_t i = 0; i < SMALL && i < m->allowed; i++) {
        m->pieces[i].data = m->places[i];
        if (i % 10 == 9) {
            mls_ready_counter_advance(ready, i + 1);
        }
        for (int k = 0; m->waits && i == SMALL / 2 && k < 5000; k++) {
            usleep(atomic_load(&calls) == 0 ? 1000 : 0);
        }
    }
    m->early = atomic_load(&calls);
    return m->allowed >= SMALL;
}

/* In file order, so that the first destinations are enough to start; or in the order of
 * the request, so that nearly all are needed. */
static void take_pieces(place_maker *m, const crowd *c, bool in_order)
{
    static unsigned char nowhere;
    for (size_t i = 0; i < SMALL; i++) {
        const size_t at = in_order ? i * 7 % SMALL : i;
        m->pieces[at] = c->pieces[i];
        m->places[at] = c->pieces[i].data;
        m->pieces[at].data = &nowhere; /* any address, as the header allows */
    }
    memset(c->got, 0, SMALL * SMALL_BYTES);
    atomic_store(&calls, 0);
}

TEST(destinations_are_allocated_while_reading)
{
    static place_maker m;
    crowd *c = crowd_new();
    size_t failed;
    for (int i = 0; i < 4; i++) {
        const mls_maker maker = {.make = make_places, .context = &m};
        const bool alone = i >= 2;
        m = (place_maker){.allowed = SMALL, .waits = i == 0};
        take_pieces(&m, c, i % 2 == 0);
        mls_read_request request =
            request_of(m.pieces, SMALL, alone ? NULL : four_threads);
        request.maker = &maker;
        CHECK(mls_shards_read(&request, &failed, &status) == MLS_OK);
        CHECK(memcmp(c->got, c->data, SMALL * SMALL_BYTES) == 0);
        CHECK(!m.waits || m.early > 0);
        CHECK(!alone || m.early == 0);
    }
    crowd_free(c);
}

TEST(failed_destination_allocation_stops_reading)
{
    static place_maker m;
    crowd *c = crowd_new();
    size_t failed;
    const mls_maker maker = {.make = make_places, .context = &m};
    for (size_t allowed = 0; allowed < SMALL; allowed += SMALL / 3) {
        m = (place_maker){.allowed = allowed};
        take_pieces(&m, c, true);
        mls_read_request request =
            request_of(m.pieces, SMALL, allowed == 0 ? NULL : four_threads);
        request.maker = &maker;
        CHECK_FAILS(mls_shards_read(&request, &failed, &status), MLS_E_STOPPED,
                    "tensor 'weight', file 'segment-a': cancelled by the caller");
        CHECK(status.code == MLS_E_STOPPED);
    }
    m = (place_maker){.allowed = 0};
    mls_read_request request = request_of(NULL, 0, NULL);
    request.maker = &maker;
    CHECK(mls_shards_read(&request, &failed, &status) == MLS_E_STOPPED);
    crowd_free(c);
}

/* ---- damage ---- */

TEST(damage_is_reported_with_its_offset)
{
    enum { BYTES = 3 * BLOCK + 5000 };
    static const size_t places[] = {0, BLOCK - 1, BLOCK, 2 * BLOCK + 77, BYTES - 1};
    unsigned char *data = noise(BYTES), *got = malloc(BYTES);
    REQUIRE(data != NULL && got != NULL);
    mls_stored_shard shard = store("damaged", data, BYTES);
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        const size_t start = places[i] / BLOCK * BLOCK;
        const size_t end = start + BLOCK < BYTES ? start + BLOCK : BYTES;
        const unsigned char bad = data[places[i]] ^ 0x10U;
        CHECK(put(shard.file, &bad, 1, PAYLOAD + places[i]));
        CHECK(read_one(&shard, shard.part, got, true, &status) == MLS_E_CHECKSUM);
        CHECK(status.has_offset && status.offset == PAYLOAD + start);
        CHECK_TEXT(status.name, "weight");
        CHECK(strstr(status.text, "'damaged'") != NULL && status.expected[0] &&
              status.got[0]);
        CHECK(read_one(&shard, shard.part, got, false, &status) == MLS_OK);
        CHECK(got[places[i]] == bad);
        /* another byte of the damaged block; then all bytes before and after the block */
        const size_t other = places[i] == start ? end - 1 : start;
        mls_part part = flat_part(BYTES, other, other + 1);
        CHECK(read_one(&shard, &part, got, true, &status) == MLS_E_CHECKSUM);
        part = flat_part(BYTES, 0, start);
        CHECK(read_one(&shard, &part, got, true, &status) == MLS_OK);
        CHECK(memcmp(got, data, start) == 0);
        part = flat_part(BYTES, end, BYTES);
        CHECK(read_one(&shard, &part, got, true, &status) == MLS_OK);
        CHECK(memcmp(got, data + end, BYTES - end) == 0);
        CHECK(put(shard.file, &data[places[i]], 1, PAYLOAD + places[i]));
    }
    drop(&shard);
    free(data);
    free(got);
}

/* Without a destination only the checksums are compared: of the blocks of the part, by
 * one thread or several. */
TEST(a_piece_without_a_destination_is_compared)
{
    enum { BYTES = 17 * BLOCK + 5000 };
    unsigned char *data = noise(BYTES);
    REQUIRE(data != NULL);
    mls_stored_shard shard = store("damaged", data, BYTES);
    const mls_part part = flat_part(BYTES, 4 * BLOCK, BYTES);
    const mls_read_piece piece = {.shard = &shard, .to = &part};
    for (int i = 0; i < 2; i++) {
        size_t failed = 99;
        uint64_t read = 0;
        mls_read_request request = request_of(&piece, 1, i == 0 ? NULL : four_threads);
        request.read = &read;
        CHECK(mls_shards_read(&request, &failed, &status) == MLS_OK);
        CHECK(read == BYTES - 4 * BLOCK);
        CHECK(put(shard.file, "damage", 6, PAYLOAD + 3 * BLOCK));
        CHECK(mls_shards_read(&request, &failed, &status) == MLS_OK);
        CHECK(put(shard.file, "damage", 6, PAYLOAD + 16 * BLOCK));
        CHECK(mls_shards_read(&request, &failed, &status) == MLS_E_CHECKSUM);
        CHECK(failed == 0 && status.offset == PAYLOAD + 16 * BLOCK);
        CHECK(put(shard.file, data, BYTES, PAYLOAD));
    }
    drop(&shard);
    free(data);
}

/* Of two damaged blocks of one piece the first is reported, in any order of threads. */
TEST(the_first_damaged_block_is_reported)
{
    enum { BYTES = 17 * BLOCK };
    unsigned char *data = noise(BYTES), *got = malloc(BYTES);
    REQUIRE(data != NULL && got != NULL);
    mls_stored_shard shard = store("damaged", data, BYTES);
    CHECK(put(shard.file, "damage", 6, PAYLOAD + 3 * BLOCK));
    CHECK(put(shard.file, "damage", 6, PAYLOAD + 4 * BLOCK));
    CHECK(put(shard.file, "damage", 6, PAYLOAD + 16 * BLOCK));
    const mls_read_piece pieces[] = {{.shard = &shard, .to = shard.part, .data = got}};
    for (int i = 0; i < 5; i++) {
        size_t failed = 99;
        mls_read_request request = request_of(pieces, 1, four_threads);
        CHECK(mls_shards_read(&request, &failed, &status) == MLS_E_CHECKSUM);
        CHECK(failed == 0 && status.offset == PAYLOAD + 3 * BLOCK);
    }
    drop(&shard);
    free(data);
    free(got);
}

/* ---- files that differ from the index ---- */

TEST(missing_file_raises_a_system_error)
{
    unsigned char data[100] = {1}, got[100];
    mls_stored_shard shard = store("gone", data, sizeof data);
    CHECK(unlinkat(pool_fd, "gone", 0) == 0);
    CHECK(read_one(&shard, shard.part, got, true, &status) == MLS_E_IO);
    CHECK(status.os_error == ENOENT && strstr(status.text, "'gone'") != NULL);
    CHECK_TEXT(status.name, "weight");
    drop(&shard);
}

TEST(another_length_than_recorded_is_refused)
{
    unsigned char data[100] = {1}, got[100];
    mls_stored_shard shard = store("length", data, sizeof data);
    for (uint64_t bytes = PAYLOAD + 99; bytes <= PAYLOAD + 101; bytes += 2) {
        CHECK(set_length("length", bytes));
        CHECK(read_one(&shard, shard.part, got, false, &status) == MLS_E_FORMAT);
        CHECK_TEXT(status.expected, "4196 bytes");
        CHECK_TEXT(status.got, bytes < PAYLOAD + 100 ? "4195 bytes" : "4197 bytes");
        CHECK_TEXT(status.name, "weight");
    }
    drop(&shard);
}

TEST(only_regular_files_are_read)
{
    unsigned char data[100] = {1}, got[100];
    mls_stored_shard shard = store("real", data, sizeof data);
    CHECK(mkfifoat(pool_fd, "fifo", 0600) == 0 && mkdirat(pool_fd, "inner", 0700) == 0);
    CHECK(symlinkat("real", pool_fd, "link") == 0);
    CHECK(symlinkat("nowhere", pool_fd, "dangling") == 0);
    static const char *const files[] = {"fifo", "inner", "link", "dangling"};
    for (size_t i = 0; i < 4; i++) {
        mls_stored_shard other = shard;
        other.file = files[i];
        CHECK(read_one(&other, shard.part, got, true, &status) == MLS_E_FORMAT);
        CHECK_TEXT(status.expected, "a regular file");
        CHECK(unlinkat(pool_fd, files[i], i == 1 ? AT_REMOVEDIR : 0) == 0);
    }
    drop(&shard);
}

TEST(records_that_point_beyond_the_file_are_refused)
{
    unsigned char data[100] = {1}, got[300];
    size_t failed = 99;
    mls_stored_shard shard = store("real", data, sizeof data), liar = shard;
    liar.offset++;
    CHECK(read_one(&liar, liar.part, got, false, &status) == MLS_E_FORMAT);
    CHECK_TEXT(status.name, "weight");
    liar.offset = UINT64_MAX - 50;
    CHECK(read_one(&liar, liar.part, got, true, &status) == MLS_E_FORMAT);
    liar.offset = PAYLOAD;
    liar.item_bytes = SIZE_MAX / 50;
    CHECK(read_one(&liar, liar.part, got, true, &status) == MLS_E_FORMAT);
    /* the error is about the damaged piece before it */
    const mls_read_piece pieces[] = {
        {.shard = &shard, .to = shard.part, .data = got},
        {.shard = &shard, .to = shard.part, .data = got + 100},
        {.shard = &liar, .to = shard.part, .data = got + 200}};
    mls_read_request request = request_of(pieces, 3, NULL);
    CHECK(mls_shards_read(&request, &failed, &status) == MLS_E_FORMAT);
    CHECK(failed == 2 && got[0] == 1);
    CHECK(put("real", "x", 1, PAYLOAD));
    CHECK(mls_shards_read(&request, &failed, &status) == MLS_E_CHECKSUM);
    CHECK(failed == 0);
    drop(&shard);
}

TEST(file_truncated_while_reading_is_reported)
{
    enum { BYTES = 3 * BLOCK };
    unsigned char *data = noise(BYTES), *got = malloc(BYTES);
    REQUIRE(data != NULL && got != NULL);
    for (int verify = 0; verify < 2; verify++) {
        mls_stored_shard shard = store("shrinking", data, BYTES);
        snprintf(cut_file, sizeof cut_file, "%s/shrinking", pool_path);
        /* before the first read, or between the reads of two blocks */
        atomic_store(&cut_after, verify);
        CHECK(read_one(&shard, shard.part, got, verify, &status) == MLS_E_FORMAT);
        CHECK(status.has_offset && strstr(status.text, "shorter") != NULL);
        CHECK_TEXT(status.name, "weight");
        atomic_store(&cut_after, -1);
        drop(&shard);
    }
    free(data);
    free(got);
}

/* ---- files in memory ---- */

TEST(calls_with_different_ranges_read_a_file_in_memory)
{
    enum { BYTES = 2 * MLS_READ_SPAN + 5 * BLOCK / 2, CUT = PAYLOAD + MLS_READ_SPAN };
    unsigned char *data = noise(BYTES), *got = calloc(BYTES, 1);
    REQUIRE(data != NULL && got != NULL);
    mls_stored_shard shard = store("elsewhere", data, BYTES);
    const unsigned char *second = data + MLS_READ_SPAN;
    const uint64_t end = PAYLOAD + BYTES;
    const mls_file_range first[] = {
        {"elsewhere", PAYLOAD, CUT, end, data, MLS_READ_SPAN}};
    const mls_file_range rest[] = {
        {"other", CUT, end, end, got, 0},
        {"elsewhere", CUT, CUT + 7, end, second, 7},
        {"elsewhere", CUT + 7, end, end, second + 7, BYTES - MLS_READ_SPAN - 7}};
    const mls_read_piece piece = {.shard = &shard, .to = shard.part, .data = got};
    CHECK(unlinkat(pool_fd, "elsewhere", 0) == 0);
    for (int verify = 0; verify < 2; verify++) {
        size_t failed = 99;
        uint64_t read = 0;
        mls_read_request request = request_of(&piece, 1, verify ? four_threads : NULL);
        request.folder = -1;
        request.crc = verify ? crc : NULL;
        request.in_memory = true;
        request.read = &read;
        memset(got, 0, BYTES);
        CHECK(mls_shards_read(&request, &failed, &status) == MLS_OK && read == 0);
        request.ranges = first;
        request.range_count = 1;
        CHECK(mls_shards_read(&request, &failed, &status) == MLS_OK);
        CHECK(read == MLS_READ_SPAN && memcmp(got, data, MLS_READ_SPAN) == 0);
        CHECK(got[MLS_READ_SPAN] == 0 && got[BYTES - 1] == 0);
        request.ranges = rest;
        request.range_count = 3;
        CHECK(mls_shards_read(&request, &failed, &status) == MLS_OK);
        CHECK(read == BYTES - MLS_READ_SPAN && memcmp(got, data, BYTES) == 0);
    }
    drop(&shard);
    free(data);
    free(got);
}

TEST(short_answers_are_refused)
{
    unsigned char data[100] = {1}, got[100];
    size_t failed = 99;
    mls_stored_shard shard = store("answer", data, sizeof data);
    mls_file_range range = {"answer", PAYLOAD, PAYLOAD + 100, PAYLOAD + 100, data, 60};
    const mls_read_piece piece = {.shard = &shard, .to = shard.part, .data = got};
    mls_read_request request = request_of(&piece, 1, NULL);
    request.in_memory = true;
    request.ranges = &range;
    request.range_count = 1;
    CHECK(mls_shards_read(&request, &failed, &status) == MLS_E_FORMAT && failed == 0);
    CHECK(status.has_offset && strstr(status.text, "shorter") != NULL);
    range.file_bytes = PAYLOAD + 60;
    CHECK(mls_shards_read(&request, &failed, &status) == MLS_E_FORMAT);
    CHECK(strstr(status.text, "bytes long") != NULL);
    range.file_bytes = PAYLOAD + 100;
    range.bytes = 100;
    data[99] = 1;
    CHECK(mls_shards_read(&request, &failed, &status) == MLS_E_CHECKSUM);
    drop(&shard);
}

/* ---- nothing to do ---- */

TEST(disjoint_part_opens_no_file)
{
    unsigned char got[4];
    size_t failed = 99;
    watcher seen = {.allowed = 0};
    const mls_progress progress = {.report = watch, .context = &seen};
    const mls_part to = flat_part(100, 40, 44);
    mls_part part = flat_part(100, 0, 40);
    const mls_stored_shard shard = {.file = "nowhere",
                                    .file_bytes = PAYLOAD + 40,
                                    .offset = PAYLOAD,
                                    .item_bytes = 1,
                                    .part = &part};
    CHECK(read_one(&shard, &to, got, true, &status) == MLS_OK);
    part.begin = 40; /* also for an empty shard */
    const mls_read_piece piece = {.shard = &shard, .to = &to, .data = got};
    mls_read_request request = request_of(&piece, 1, NULL);
    request.progress = &progress;
    CHECK(mls_shards_read(&request, &failed, &status) == MLS_OK);
    request = request_of(NULL, 0, NULL);
    request.progress = &progress;
    CHECK(mls_shards_read(&request, &failed, &status) == MLS_OK);
    CHECK(atomic_load(&seen.calls) == 0 && failed == 99);
}

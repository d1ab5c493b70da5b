/* shards: a checkpoint's pool in a temporary folder, for all tests of a file, and items
 * to store in it; for the tests that plan, compare, write and verify shards.
 */
#ifndef MLS_SHARDS_H
#define MLS_SHARDS_H

#include "base/memory.h"
#include "checkpoint/ranks/merged_index.h"
#include "checkpoint/ranks/requested_part.h"
#include "checkpoint/write/shard_write.h"
#include "io/file.h"
#include "support/parts.h"
#include "support/random_bytes.h"
#include "support/text.h"
#include "support/whole_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static const mls_kernels *kernels; /* the machine's fastest */
static const mls_crc_kernels *crc;
static mls_pool *four_threads;
static char pool_path[160]; /* of the pool */
static int pool_fd = -1;

/* Several generations, the older ones first. */
static const char *const generations[] = {"0123456789abcdef", "1123456789abcdef",
                                          "2123456789abcdef", "3123456789abcdef"};

static const char *const pool_folders[] = {"params", "optim_state", "index"};

/* Make a pool under `base`, or in the usual place if that is NULL. */
static inline void enter_pool(const char *base)
{
    const char *usual = getenv("TMPDIR");
    snprintf(pool_path, sizeof pool_path, "%s/mlstate-pool-XXXXXX",
             base != NULL    ? base
             : usual != NULL ? usual
                             : "/tmp");
    bool good = mkdtemp(pool_path) != NULL &&
                (pool_fd = open(pool_path, O_RDONLY | O_DIRECTORY)) >= 0;
    for (size_t i = 0; good && i < 3; i++) {
        good = mkdirat(pool_fd, pool_folders[i], 0700) == 0;
    }
    if (!good) {
        printf("    no temporary folder\n");
        exit(1);
    }
}

/* Number of files in one of the pool's folders; deletes them if requested. */
static inline size_t files_in(const char *folder, bool delete)
{
    size_t count = 0;
    char path[200];
    snprintf(path, sizeof path, "%s/%s", pool_path, folder);
    DIR *stream = opendir(path);
    for (struct dirent *e; stream != NULL && (e = readdir(stream)) != NULL;) {
        if (e->d_name[0] != '.') {
            count++;
            (void)(delete ? unlinkat(dirfd(stream), e->d_name, 0) : 0);
        }
    }
    if (stream != NULL) {
        closedir(stream);
    }
    return count;
}

/* Number of all files of the pool. */
static inline size_t pool_files(void)
{
    return files_in("params", false) + files_in("optim_state", false) +
           files_in("index", false);
}

/* Delete all files of the pool. */
static inline void empty_pool(void)
{
    for (size_t i = 0; i < 3; i++) {
        (void)files_in(pool_folders[i], true);
    }
}

static inline void leave_pool(void)
{
    empty_pool();
    for (size_t i = 0; i < 3; i++) {
        (void)unlinkat(pool_fd, pool_folders[i], AT_REMOVEDIR);
    }
    close(pool_fd);
    CHECK(rmdir(pool_path) == 0);
}

BEFORE_ALL
{
    mls_cpu cpu;
    REQUIRE(mls_cpu_choose(NULL, &cpu, &status) == MLS_OK);
    REQUIRE(mls_pool_new(4, &four_threads, &status) == MLS_OK);
    kernels = mls_kernels_of(cpu);
    crc = mls_crc_of(cpu);
    enter_pool(NULL);
}

AFTER_ALL
{
    leave_pool();
    mls_pool_free(four_threads);
}

/* From now on, work in the calling thread, with the scalar kernels. */
static inline void use_one_thread(void)
{
    mls_pool_free(four_threads);
    four_threads = NULL;
    kernels = mls_kernels_of(MLS_CPU_SCALAR);
    crc = &mls_crc_scalar;
}

/* Bytes that do not repeat soon; the caller frees them. */
static inline unsigned char *noise(size_t bytes)
{
    unsigned char *data = malloc(bytes + 1);
    if (data != NULL) {
        fill_random(data, bytes, 0x9E3779B97F4A7C15U + bytes);
    }
    return data;
}

/* The next file descriptor: the same as before if no file stayed open. */
static inline int next_descriptor(void)
{
    const int fd = dup(pool_fd);
    close(fd);
    return fd;
}

/* A whole tensor; with `state` an optimizer state. */
static inline mls_shard_item item_of(const char *name, const char *state, mls_dtype dtype,
                                     int rank, const size_t *shape, const void *data)
{
    return (mls_shard_item){
        .id = {.section = state == NULL ? MLS_PARAMS : MLS_OPTIM_STATE,
               .name = text(name),
               .state = text(state == NULL ? "" : state),
               .has_state = state != NULL},
        .dtype = dtype,
        .rank = rank,
        .shape = shape,
        .data = data};
}

/* One part of a tensor. */
static inline mls_shard_item part_of(mls_shard_item item, int axis, size_t parts,
                                     size_t part)
{
    item.layout = cut(axis, parts);
    item.part = part;
    return item;
}

/* The job of a single rank. */
static inline mls_shard_job job_of(const mls_shard_item *items, size_t count,
                                   const char *generation, const mls_index *before)
{
    return (mls_shard_job){.folder = pool_fd,
                           .mode = 0666,
                           .generation = generation,
                           .world_size = 1,
                           .items = items,
                           .count = count,
                           .before = before,
                           .pack_below = 256 << 10,
                           .kernels = kernels,
                           .crc = crc,
                           .pool = four_threads};
}

/* Read one of the pool's files; release with mls_free().  Returns NULL if it is
 * missing. */
static inline unsigned char *read_pool_file(const char *path, size_t *length)
{
    char full_path[sizeof pool_path + MLS_PATH_BYTES + 2];
    snprintf(full_path, sizeof full_path, "%s/%s", pool_path, path);
    return read_file(full_path, length);
}

/* Parse one of the pool's indexes; release it with mls_index_fini. */
static inline mls_index read_index(const char *path)
{
    mls_index index = {0};
    mls_status st;
    size_t length = 0;
    char *data = (char *)read_pool_file(path, &length);
    CHECK(data != NULL);
    if (data != NULL && mls_index_parse(data, length, crc, &index, &st) != MLS_OK) {
        printf("    %s\n", st.text);
        CHECK(false && "the index does not parse");
    }
    mls_free(data);
    return index;
}

/* Write all of a job, which must succeed; returns its parsed index. */
static inline mls_index write_all(const mls_shard_job *job, mls_shards_written *written)
{
    mls_status st;
    if (mls_shards_write(job, written, &st) != MLS_OK) {
        printf("    %s\n", st.text);
        CHECK(false && "nothing was written");
        return (mls_index){0};
    }
    return read_index(written->path);
}

/* Read a whole tensor back from all its parts through a merged index: with and without
 * checksums. */
static inline bool reads_back(const mls_index *index, const mls_shard_item *item,
                              const void *expected, const mls_codecs *codecs)
{
    mls_merged_index merged = {0};
    mls_stored_shard stored[16];
    mls_part parts[16];
    mls_read_piece pieces[16];
    const mls_index *disagreeing;
    mls_status st;
    size_t count = 0, failed;
    const mls_part to = part_at((mls_layout){0}, item->rank, item->shape, 0);
    if (mls_merged_index_init(&merged, &index, 1, &disagreeing, &st) != MLS_OK) {
        return false;
    }
    const size_t bytes = mls_part_count(&to) * mls_dtype_of(item->dtype)->item_bytes;
    const size_t number = mls_merged_index_find(&merged, &item->id);
    unsigned char *got = malloc(bytes + 1);
    bool good = got != NULL && number != SIZE_MAX &&
                merged.tensors[number].places <= 16 &&
                mls_requested_part_pieces(&merged, &merged.tensors[number], &to, got,
                                          &(mls_read_scratch){stored, parts, pieces},
                                          &count, &st) == MLS_OK;
    for (int verified = 0; good && verified < 2; verified++) {
        memset(got, 0xA5, bytes);
        good = mls_shards_read(&(mls_read_request){.folder = pool_fd,
                                                   .pieces = pieces,
                                                   .count = count,
                                                   .crc = verified ? crc : NULL,
                                                   .codecs = codecs,
                                                   .pool = four_threads},
                               &failed, &st) == MLS_OK &&
               memcmp(got, expected, bytes) == 0;
    }
    free(got);
    mls_merged_index_fini(&merged);
    return good;
}

/* Change one byte of a file; returns false if the file is too short. */
static inline bool flip(const char *path, uint64_t offset, unsigned bits)
{
    unsigned char byte;
    const int fd = openat(pool_fd, path, O_RDWR);
    bool good = fd >= 0 && pread(fd, &byte, 1, (off_t)offset) == 1;
    byte = good ? (unsigned char)(byte ^ bits) : 0;
    good = good && pwrite(fd, &byte, 1, (off_t)offset) == 1;
    return (fd < 0 || close(fd) == 0) && good;
}

static inline bool set_length(const char *path, uint64_t bytes)
{
    const int fd = openat(pool_fd, path, O_WRONLY);
    const bool good = fd >= 0 && ftruncate(fd, (off_t)bytes) == 0;
    return (fd < 0 || close(fd) == 0) && good;
}

/* The state of a progress callback. */
typedef struct watcher {
    atomic_ullong bytes;
    atomic_int calls, allowed; /* the callback returns false after this many calls */
} watcher;

static inline bool watch(void *context, uint64_t bytes)
{
    watcher *w = context;
    atomic_fetch_add(&w->bytes, bytes);
    return atomic_fetch_add(&w->calls, 1) + 1 < atomic_load(&w->allowed);
}

#endif

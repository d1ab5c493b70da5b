#include "support/shm_ranks.h"

static unsigned char byte_of(size_t rank, size_t i)
{
    return (unsigned char)(rank * 31 + i * 7 + i / 251);
}

/* Arrays are this many times as long: threads read large ones in place. */
static size_t scale = 1;
enum { LARGE = 40 };

static void gather(rank_case *c)
{
    size_t sizes[RANKS_MOST], all = 0, start = 0;
    for (size_t r = 0; r < c->world; r++) {
        sizes[r] = r == 1 ? 0 : (9001 * r + 3) * scale;
        start += r < c->rank ? sizes[r] : 0;
        all += sizes[r];
    }
    unsigned char *contribution = malloc(sizes[c->rank] + 1), *out = malloc(all + 1);
    for (size_t i = 0; i < sizes[c->rank]; i++) {
        contribution[i] = byte_of(c->rank, i);
    }
    for (int round = 0; round < 2; round++) {
        memset(out, 0, all);
        memcpy(out + start, contribution, sizes[c->rank]);
        const void *from = round == 0 ? contribution : out + start; /* in place */
        EXPECT(c, mls_shm_all_gather(c->g, &quick, from, sizes, out, &c->st) == MLS_OK);
        size_t at = 0, wrong = 0;
        for (size_t r = 0; r < c->world; r++) {
            for (size_t i = 0; i < sizes[r]; i++) {
                wrong += out[at++] != byte_of(r, i);
            }
        }
        EXPECT(c, wrong == 0);
    }
    free(contribution);
    free(out);
}

TEST(bytes_of_all_ranks_are_gathered)
{
    everywhere(gather);
    scale = LARGE;
    everywhere(gather);
    scale = 1;
}

static void broadcast(rank_case *c)
{
    const size_t most = 30000 * scale;
    unsigned char *data = malloc(most);
    for (size_t root = 0; root < c->world; root++) {
        for (size_t n = 0; n <= most; n += most / 4) {
            for (size_t i = 0; i < n; i++) {
                data[i] = c->rank == root ? byte_of(root, i) : 0;
            }
            EXPECT(c, mls_shm_broadcast(c->g, &quick, data, n, root, &c->st) == MLS_OK);
            size_t wrong = 0;
            for (size_t i = 0; i < n; i++) {
                wrong += data[i] != byte_of(root, i);
            }
            EXPECT(c, wrong == 0);
        }
    }
    free(data);
}

TEST(one_ranks_bytes_reach_all)
{
    everywhere(broadcast);
    scale = LARGE;
    everywhere(broadcast);
    scale = 1;
}

/* Rank a sends 4000 * a + 100 * b bytes to rank b. */
static size_t sent_bytes(size_t from, size_t to)
{
    return from == 2 ? 0 : 4000 * from + 100 * to;
}

static void trade(rank_case *c)
{
    size_t sent[RANKS_MOST], received[RANKS_MOST], out_bytes = 0, in_bytes = 0;
    for (size_t r = 0; r < c->world; r++) {
        sent[r] = sent_bytes(c->rank, r);
        received[r] = sent_bytes(r, c->rank);
        out_bytes += sent[r];
        in_bytes += received[r];
    }
    unsigned char *data = malloc(out_bytes + 1), *out = calloc(in_bytes + 1, 1);
    size_t at = 0;
    for (size_t r = 0; r < c->world; r++) {
        for (size_t i = 0; i < sent[r]; i++) {
            data[at++] = byte_of(c->rank * 10 + r, i);
        }
    }
    EXPECT(c,
           mls_shm_all_to_all(c->g, &quick, data, sent, out, received, &c->st) == MLS_OK);
    at = 0;
    size_t wrong = 0;
    for (size_t r = 0; r < c->world; r++) {
        for (size_t i = 0; i < received[r]; i++) {
            wrong += out[at++] != byte_of(r * 10 + c->rank, i);
        }
    }
    EXPECT(c, wrong == 0);
    received[0] += c->rank + 1 == c->world; /* one rank expects more than it gets */
    const mls_code code =
        mls_shm_all_to_all(c->g, &quick, data, sent, out, received, &c->st);
    EXPECT(c, code == MLS_E_PEER && strstr(c->st.text, "rank 0 sends") != NULL);
    EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_OK);
    free(data);
    free(out);
}

TEST(every_rank_sends_to_every_other)
{
    everywhere(trade);
}

typedef struct collected {
    unsigned char *data[RANKS_MOST];
    size_t sizes[RANKS_MOST];
    size_t world;
    bool refuse;
} collected;

static bool keep(void *context, const size_t *sizes, unsigned char **out)
{
    collected *k = context;
    for (size_t r = 0; !k->refuse && r < k->world; r++) {
        k->sizes[r] = sizes[r];
        k->data[r] = out[r] = malloc(sizes[r] + 1);
    }
    return !k->refuse;
}

static void collect(rank_case *c)
{
    for (int root = -1; root < (int)c->world; root++) {
        collected k = {.world = c->world};
        const mls_shm_buffer_provider provider = {.provide = keep, .context = &k};
        const size_t n = root == 0 ? c->rank : 6000 * c->rank + 4000;
        unsigned char *contribution = malloc(n + 1);
        for (size_t i = 0; i < n; i++) {
            contribution[i] = byte_of(c->rank, i);
        }
        EXPECT(c, mls_shm_gather_bytes(c->g, &quick, contribution, n, root, &provider,
                                       &c->st) == MLS_OK);
        for (size_t r = 0; r < c->world; r++) {
            EXPECT(c, (k.data[r] != NULL) == (root < 0 || root == (int)c->rank));
            size_t wrong = 0;
            for (size_t i = 0; i < k.sizes[r]; i++) {
                wrong += k.data[r][i] != byte_of(r, i);
            }
            EXPECT(c, wrong == 0);
            free(k.data[r]);
        }
        free(contribution);
    }
}

TEST(bytes_of_any_length_are_gathered)
{
    everywhere(collect);
}

static void refuse(rank_case *c)
{
    collected k = {.world = c->world, .refuse = c->rank == 0};
    const mls_shm_buffer_provider provider = {.provide = keep, .context = &k};
    const mls_code code =
        mls_shm_gather_bytes(c->g, &quick, "abc", 3, -1, &provider, &c->st);
    EXPECT(c, code == (c->rank == 0 ? MLS_E_MEMORY : MLS_OK));
    EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_E_PEER);
    EXPECT(c, strstr(c->st.text, "gather_bytes failed on rank 0") != NULL);
    for (size_t r = 0; r < c->world; r++) {
        free(k.data[r]);
    }
}

TEST(memory_that_runs_out_half_way_ends_the_group)
{
    in_threads((mls_shm_shape){.world = 2}, refuse);
}

/* Rank 0 gathers in place, so it waits while rank 1 copies to new pages. It gives up
 * meanwhile, and unmaps its array at once: no rank may read the array afterwards. */
static void unmap_after_giving_up(rank_case *c)
{
    enum { BYTES = 16 << 20 };
    static atomic_uint rounds;
    const mls_shm_call hasty = {
        .timeout = c->rank == 0 ? 5e-4 * (1 + atomic_fetch_add(&rounds, 1) % 8) : 20};
    const size_t sizes[2] = {BYTES, 0};
    unsigned char *out =
        mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(c, out != MAP_FAILED);
    if (c->rank == 0) {
        memset(out, 7, BYTES);
    }
    (void)mls_shm_barrier(c->g, &quick, &c->st);
    const mls_code code = mls_shm_all_gather(c->g, &hasty, out, sizes, out, &c->st);
    if (code == MLS_OK) {
        EXPECT(c, out[0] == 7 && memcmp(out, out + 1, BYTES - 1) == 0);
    } else {
        EXPECT(c, code == MLS_E_PEER);
    }
    munmap(out, BYTES);
}

TEST(an_array_may_be_freed_once_its_operation_failed)
{
    for (int round = 0; round < TRIES(60); round++) {
        in_threads((mls_shm_shape){.world = 2}, unmap_after_giving_up);
    }
}

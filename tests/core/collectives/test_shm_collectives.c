/* tests/collectives compares the results of all operations with NumPy. */
#include "support/shm_ranks.h"

typedef struct collected {
    unsigned char *data[RANKS_MOST];
    size_t world;
    bool refuse;
} collected;

static bool keep(void *context, const size_t *sizes, unsigned char **out)
{
    collected *k = context;
    for (size_t r = 0; !k->refuse && r < k->world; r++) {
        k->data[r] = out[r] = malloc(sizes[r] + 1);
    }
    return !k->refuse;
}

static void drop(collected *k)
{
    for (size_t r = 0; r < k->world; r++) {
        free(k->data[r]);
    }
}

static size_t length; /* of arrays: threads read large ones in place */

/* Sanitizers watch the memory of every operation. All bytes of a rank are its number. */
static void use_every_operation(rank_case *c)
{
    size_t uneven[RANKS_MOST], equal[RANKS_MOST], all = 0;
    for (size_t r = 0; r < c->world; r++) {
        uneven[r] = r == 1 ? 0 : length + r;
        equal[r] = length;
        all += uneven[r] + length;
    }
    unsigned char *data = malloc(all + RANKS_MOST), *out = calloc(all + 1, 1);
    memset(data, (int)c->rank, all + RANKS_MOST);
    EXPECT(c, mls_shm_all_gather(c->g, &quick, data, uneven, out, &c->st) == MLS_OK);
    size_t end = 0, wrong = 0;
    for (size_t r = 0; r < c->world; r++) {
        end += uneven[r];
        wrong += uneven[r] > 0 && (out[end - uneven[r]] != r || out[end - 1] != r);
    }
    EXPECT(c,
           mls_shm_all_to_all(c->g, &quick, data, equal, out, equal, &c->st) == MLS_OK);
    for (size_t r = 0; r < c->world; r++) {
        wrong += out[r * length] != r || out[(r + 1) * length - 1] != r;
    }
    for (int root = -1; root < (int)c->world; root++) {
        collected k = {.world = c->world};
        const mls_shm_buffer_provider provider = {.provide = keep, .context = &k};
        EXPECT(c, mls_shm_gather_bytes(c->g, &quick, data, length + c->rank, root,
                                       &provider, &c->st) == MLS_OK);
        for (size_t r = 0; r < c->world && k.data[r] != NULL; r++) {
            wrong += k.data[r][0] != r || k.data[r][length + r - 1] != r;
        }
        drop(&k);
    }
    EXPECT(c,
           mls_shm_broadcast(c->g, &quick, data, length, c->world - 1, &c->st) == MLS_OK);
    wrong += data[0] != c->world - 1 || data[length - 1] != c->world - 1;
    EXPECT(c, wrong == 0);
    free(data);
    free(out);
}

TEST(operations_stay_within_their_memory)
{
    for (length = 9001; length < 1000000; length *= 40) {
        everywhere(use_every_operation);
    }
}

static void expect_more(rank_case *c)
{
    char text[MLS_TEXT_BYTES];
    const size_t sent[] = {1, 2}, received[] = {1 + c->rank, 1 + 2 * c->rank};
    unsigned char data[3] = {0}, out[5];
    snprintf(text, sizeof text,
             "all_to_all on rank %zu: rank 1 sends 2 bytes to rank 1, which expects 3",
             c->rank);
    EXPECT(c, mls_shm_all_to_all(c->g, &quick, data, sent, out, received, &c->st) ==
                      MLS_E_PEER &&
                  strcmp(c->st.text, text) == 0);
    EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_OK);
}

TEST(ranks_that_expect_more_than_is_sent_are_refused)
{
    in_threads((mls_shm_shape){.world = 2}, expect_more);
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
    drop(&k);
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

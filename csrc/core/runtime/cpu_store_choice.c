/* cpu_store_choice: whether copies use memcpy, a loop or stores past the cache: times
 * trials and decides; MLSTATE_COPY. */
#include "runtime/cpu_store_choice.h"

#include "runtime/cpu_features.h"

#include <string.h>
#include <time.h>

enum { UNDECIDED = -1 };

static const char *const store_names[MLS_STORES] = {"plain", "loop", "stream1"};
static const char *const size_names[MLS_STORE_SIZES] = {
    "small", "small_8x", "small_64x", "within", "within_4x", "within_16x", "past"};
static const char *const operation_names[MLS_STORE_OPERATIONS] = {
    "copy", "fill", "narrow", "widen", "checksum", "reduce"};

const char *mls_store_name(mls_store store)
{
    return store_names[store];
}

const char *mls_store_size_name(mls_store_size size)
{
    return size_names[size];
}

const char *mls_store_operation_name(mls_store_operation operation)
{
    return operation_names[operation];
}

/* Set `*out` to the variant that `text`, the value of MLSTATE_COPY, names, or to
 * UNDECIDED for "auto", NULL and an empty text. MLS_E_VALUE: another text. */
static mls_code parse_forced(const char *text, int *out, mls_status *st)
{
    *out = UNDECIDED;
    if (text == NULL || text[0] == '\0' || strcmp(text, "auto") == 0) {
        return MLS_OK;
    }
    for (int store = 0; store < MLS_STORES; store++) {
        if (strcmp(text, store_names[store]) == 0) {
            *out = store;
            return MLS_OK;
        }
    }
    return mls_fail(st, MLS_E_VALUE,
                    "copy strategy '%.32s' does not exist; choose one of: plain, loop, "
                    "stream1, auto",
                    text);
}

/* Set the smallest result, in bytes, of each size class from the sizes of the caches.
 * Source and result share the last-level cache, hence the half. A forced variant starts
 * at a lower size, so that its cost below the usual classes can be measured. */
static void limit_sizes(mls_store_choices *choices)
{
    enum { FORCED_LEAST = 1 << 20 };
    const bool is_forced = choices->forced != UNDECIDED;
    const size_t past = choices->cache_bytes / 2, within = 4 * mls_cpu_cache_bytes(2);
    size_t least = is_forced ? FORCED_LEAST : within;
    for (int size = MLS_STORING_WITHIN; size < MLS_STORING_PAST; size++) {
        choices->least[size] = least < past ? least : past;
        least *= 4;
    }
    choices->least[MLS_STORING_PAST] = past;
    least = MLS_STORE_LEAST;
    for (int size = MLS_STORING_SMALL; size < MLS_STORING_WITHIN; size++) {
        const size_t most = choices->least[MLS_STORING_WITHIN];
        choices->least[size] = least < most ? least : most;
        least *= 8;
    }
}

/* Return the size class of a result of `bytes` bytes, at least MLS_STORE_LEAST. */
static mls_store_size size_class_of(const mls_store_choices *choices, size_t bytes)
{
    int size = MLS_STORING_PAST;
    while (size > MLS_STORING_SMALL && bytes < choices->least[size]) {
        size--;
    }
    return (mls_store_size)size;
}

/* Initialise all choices as undecided. Each operation, size class and kind of memory
 * (touched or fresh) has its own choice. */
mls_code mls_store_choices_init(mls_store_choices *out, const char *forced,
                                mls_status *st)
{
    int store;
    const bool is_replaced = forced != NULL && strcmp(forced, "stream4") == 0;
    const mls_code code = parse_forced(is_replaced ? "stream1" : forced, &store, st);
    if (code != MLS_OK) {
        return code;
    }
    memset(out, 0, sizeof *out);
    out->forced = store;
    out->is_replaced = is_replaced;
    out->cache_bytes = mls_cpu_cache_bytes(3);
    limit_sizes(out);
    for (int operation = 0; operation < MLS_STORE_OPERATIONS; operation++) {
        for (int size = 0; size < MLS_STORE_SIZES; size++) {
            for (int fresh = 0; fresh < 2; fresh++) {
                mls_store_choice *choice = &out->choice[operation][size][fresh];
                choice->size = (mls_store_size)size;
                atomic_init(&choice->chosen, UNDECIDED);
                atomic_init(&choice->fastest, UNDECIDED);
            }
        }
    }
    return MLS_OK;
}

static uint64_t read_nanoseconds(void)
{
    struct timespec t = {0};
    (void)clock_gettime(CLOCK_MONOTONIC, &t); /* cannot fail for an existing clock */
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

static bool has_store(unsigned variants, unsigned store)
{
    return (variants & MLS_STORE_BIT(store)) != 0;
}

/* Return whether the variant `store` has enough trials, or is already far too slow
 * compared with the rate `best`. A small copy may be slow only because its source was not
 * cached, so it needs all trials. */
static bool is_measured(mls_store_choice *choice, unsigned store, uint64_t best)
{
    const unsigned count = atomic_load(&choice->counted[store]);
    const uint64_t rate = atomic_load(&choice->rate[store]);
    if (choice->size < MLS_STORING_WITHIN) {
        return count >= MLS_STORE_TRIALS_SMALL;
    }
    return count >= MLS_STORE_TRIALS || (count >= 2 && rate < best / 2);
}

/* Return the best rate, in bytes per second, that any variant of a set has reached; 0
 * without trials. */
static uint64_t best_rate(mls_store_choice *choice, unsigned variants)
{
    uint64_t best = 0;
    for (unsigned store = 0; store < MLS_STORES; store++) {
        const uint64_t rate = atomic_load(&choice->rate[store]);
        best = has_store(variants, store) && rate > best ? rate : best;
    }
    return best;
}

/* Return the variant to try next. `begun` counts the trials of all threads, so threads
 * that work at the same time try different variants. */
mls_store mls_store_next(mls_store_choice *choice, unsigned variants)
{
    const uint64_t best = best_rate(choice, variants);
    const unsigned turn = atomic_fetch_add(&choice->begun, 1);
    for (unsigned i = 0; i < MLS_STORES; i++) {
        const unsigned store = (turn + i) % MLS_STORES;
        if (has_store(variants, store) && !is_measured(choice, store, best)) {
            return (mls_store)store;
        }
    }
    return MLS_STORE_CACHED;
}

/* Return the variant for the next bytes of results that fit the cache. Only the second of
 * two results counts, since the first finds the cache as another variant left it. */
mls_store mls_store_turn(uint64_t at, size_t result_bytes, unsigned variants,
                         bool *counts)
{
    const uint64_t result = at / (result_bytes == 0 ? 1 : result_bytes); /* its number */
    unsigned stores[MLS_STORES], count = 0;
    for (unsigned store = 0; store < MLS_STORES; store++) {
        stores[count] = store;
        count += has_store(variants, store) ? 1 : 0;
    }
    *counts = result % 2 != 0;
    return (mls_store)stores[result / 2 % count];
}

static void raise_rate(atomic_uint_fast64_t *best_rate, uint64_t rate)
{
    uint_fast64_t before = atomic_load(best_rate);
    while (rate > before && !atomic_compare_exchange_weak(best_rate, &before, rate)) {
    }
}

/* Return the variant `simple` unless `other` is faster by more than one part in
 * `parts`. */
static unsigned faster_store(mls_store_choice *choice, unsigned simple, unsigned other,
                             uint64_t parts)
{
    const uint64_t rate = atomic_load(&choice->rate[simple]);
    return atomic_load(&choice->rate[other]) > rate + rate / parts ? other : simple;
}

/* Return the simplest of the fast variants; those without trials have the rate 0. A
 * stream must win by more unless the result exceeds the cache. */
static int fastest_store(mls_store_choice *choice)
{
    const uint64_t parts = choice->size != MLS_STORING_PAST ? 4 : 16;
    const unsigned cached = faster_store(choice, MLS_STORE_CACHED, MLS_STORE_LOOP, 16);
    return (int)faster_store(choice, cached, MLS_STORE_STREAM, parts);
}

/* Choose the fastest variant until the decision expires, after a number of stored bytes.
 * Within the cache, a stream must win twice in succession, because another process may
 * have disturbed all trials of plain stores; until then the faster of the other variants
 * is used. */
static void decide_store(mls_store_choice *choice)
{
    const bool is_first = atomic_load(&choice->chosen) == UNDECIDED;
    const bool is_within = choice->size != MLS_STORING_PAST;
    const int fastest = fastest_store(choice);
    const int before = atomic_exchange(&choice->fastest, fastest);
    const bool is_sure = !is_within || fastest == before || fastest != MLS_STORE_STREAM;
    const unsigned cached = faster_store(choice, MLS_STORE_CACHED, MLS_STORE_LOOP, 16);
    atomic_store(&choice->chosen, is_sure ? fastest : (int)cached);
    const uint64_t later = is_within ? MLS_STORE_LASTS_WITHIN : MLS_STORE_LASTS;
    const uint64_t lasts = is_first ? MLS_STORE_FIRST_LASTS : later;
    atomic_store(&choice->lasts_until, atomic_load(&choice->stored) + lasts);
    atomic_store(&choice->is_decided, true);
}

/* Count one trial, and decide if all variants have enough. Two threads may both decide.
 * The later decision has seen more trials; both are valid. */
void mls_store_count(mls_store_choice *choice, unsigned variants, mls_store store,
                     size_t bytes, uint64_t nanoseconds)
{
    const double seconds = (double)(nanoseconds == 0 ? 1 : nanoseconds) * 1e-9;
    raise_rate(&choice->rate[store], (uint64_t)((double)bytes / seconds));
    atomic_fetch_add(&choice->counted[store], 1);
    const uint64_t best = best_rate(choice, variants);
    for (unsigned i = 0; i < MLS_STORES; i++) {
        if (has_store(variants, i) && !is_measured(choice, i, best)) {
            return;
        }
    }
    decide_store(choice);
}

/* Record that `bytes` bytes will be stored, and restart the trials if the decision has
 * expired. One thread restarts them; trials that other threads count meanwhile may or may
 * not be lost, which is harmless. Returns how many bytes were stored before. */
static uint64_t note_stored(mls_store_choice *choice, size_t bytes)
{
    const uint64_t before = atomic_fetch_add(&choice->stored, bytes);
    const uint64_t limit = atomic_load(&choice->lasts_until);
    if (before < limit || !atomic_load(&choice->is_decided)) {
        return before;
    }
    bool decided = true;
    if (atomic_compare_exchange_strong(&choice->is_decided, &decided, false)) {
        atomic_store(&choice->tried_since, before);
        for (int store = 0; store < MLS_STORES; store++) {
            atomic_store(&choice->counted[store], 0);
            atomic_store(&choice->rate[store], 0);
        }
    }
    return before;
}

/* Begin the next trial and start its clock. If a decision was made meanwhile, use it
 * without a trial: `choice` becomes NULL. */
static void begin_trial(mls_store_trial *trial)
{
    if (atomic_load(&trial->choice->is_decided)) {
        trial->store = (mls_store)atomic_load(&trial->choice->chosen);
        trial->left = SIZE_MAX;
        trial->choice = NULL;
        return;
    }
    trial->store = trial->fixed >= 0 ? (mls_store)trial->fixed
                                     : mls_store_next(trial->choice, trial->variants);
    trial->left = MLS_STORE_TRIAL_BYTES;
    trial->stored = 0;
    trial->started = read_nanoseconds();
}

/* Begin to store a result. Small results store through the cache; a forced variant or a
 * decision is used; otherwise a trial of at most MLS_STORE_TRIAL_BYTES begins. */
mls_store_trial mls_store_begin(mls_store_choices *choices, mls_store_operation operation,
                                unsigned variants, mls_destination destination,
                                size_t bytes)
{
    mls_store_trial trial = {
        .store = has_store(variants, MLS_STORE_LOOP) ? MLS_STORE_LOOP : MLS_STORE_CACHED,
        .left = SIZE_MAX,
        .fixed = UNDECIDED,
        .counts = true};
    if (choices == NULL || destination.bytes < MLS_STORE_LEAST) {
        return trial;
    }
    const mls_store_size size = size_class_of(choices, destination.bytes);
    if (size < MLS_STORING_WITHIN) {
        variants &= ~MLS_STORE_BIT(MLS_STORE_STREAM);
    }
    if ((variants & (variants - 1)) == 0) { /* one variant: plain stores */
        return trial;
    }
    if (choices->forced != UNDECIDED) {
        const bool is_offered = has_store(variants, (unsigned)choices->forced);
        trial.store = is_offered ? (mls_store)choices->forced : trial.store;
        return trial;
    }
    mls_store_choice *choice = &choices->choice[operation][size][destination.is_fresh];
    uint64_t before = 0;
    if (size >= MLS_STORING_WITHIN) {
        before = note_stored(choice, bytes);
    }
    if (bytes >= MLS_STORE_TRIAL_LEAST) {
        trial.choice = choice;
        trial.variants = variants;
        if (size >= MLS_STORING_WITHIN && size != MLS_STORING_PAST) {
            const uint64_t since = atomic_load(&choice->tried_since);
            trial.fixed = (int)mls_store_turn(before < since ? 0 : before - since,
                                              destination.bytes, variants, &trial.counts);
        }
        begin_trial(&trial);
    } else if (atomic_load(&choice->chosen) != UNDECIDED) {
        trial.store = (mls_store)atomic_load(&choice->chosen);
    }
    return trial;
}

/* Record that `bytes` bytes were stored. At the end of a trial the next one begins, with
 * another variant. */
void mls_store_advance(mls_store_trial *trial, size_t bytes)
{
    if (trial->choice == NULL) {
        return;
    }
    trial->stored += bytes;
    trial->left -= bytes;
    if (trial->left == 0) {
        mls_store_end(trial);
        begin_trial(trial);
    }
}

/* End an operation, and count its last trial. A part that is too short for timing does
 * not count. */
void mls_store_end(mls_store_trial *trial)
{
    if (trial->choice != NULL && trial->counts &&
        trial->stored >= MLS_STORE_TRIAL_LEAST) {
        mls_store_count(trial->choice, trial->variants, trial->store, trial->stored,
                        read_nanoseconds() - trial->started);
    }
}

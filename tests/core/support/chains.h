/* chains: chains of blocks for tests. */
#ifndef MLS_CHAINS_H
#define MLS_CHAINS_H

#include "planning/plan_costs.h"
#include "support/random_bytes.h"

#include <math.h>
#include <string.h>

enum { CHAIN_ROOM = 130 };

static const mls_poll no_poll = {0};

/* A poll that stops the work after `*context` calls. */
static inline bool stop_after_calls(void *context)
{
    int *left = context;
    return (*left)-- > 0;
}

/* A chain that owns its numbers; use `chain` after chain_of. */
typedef struct test_chain {
    double forward[CHAIN_ROOM], backward[CHAIN_ROOM];
    int64_t activation[CHAIN_ROOM], gradient[CHAIN_ROOM], saved[CHAIN_ROOM];
    int64_t temporary[3][CHAIN_ROOM];
    mls_chain chain;
} test_chain;

/* Random numbers that are the same on every machine. */
static inline uint64_t next_number(uint64_t *state, uint64_t below)
{
    *state = *state * 6364136223846793005U + 1442695040888963407U;
    return (*state >> 33) % below;
}

static inline void bind_chain(test_chain *c, size_t blocks, double rate)
{
    c->chain = (mls_chain){.blocks = blocks,
                           .forward_seconds = c->forward,
                           .backward_seconds = c->backward,
                           .activation_bytes = c->activation,
                           .gradient_bytes = c->gradient,
                           .saved_bytes = c->saved,
                           .forward_temporary_bytes = c->temporary[0],
                           .saving_temporary_bytes = c->temporary[1],
                           .backward_temporary_bytes = c->temporary[2],
                           .offload_rate = rate,
                           .load_rate = rate};
}

static inline int64_t random_below(uint64_t *state, uint64_t bound)
{
    return (int64_t)(random_next(state) % bound);
}

/* Seconds are whole, so that sums are exact. */
static inline void random_chain_fill(test_chain *out, size_t blocks, uint64_t *state,
                                     bool rates)
{
    for (size_t k = 0; k <= blocks; k++) {
        out->activation[k] = 1 + random_below(state, 99);
        out->gradient[k] = random_below(state, 4) == 0 ? 0 : out->activation[k];
    }
    for (size_t i = 0; i < blocks; i++) {
        out->forward[i] = (double)(1 + random_below(state, 255));
        out->backward[i] = (double)(1 + random_below(state, 511));
        out->saved[i] = out->activation[i + 1] + random_below(state, 150);
        for (size_t t = 0; t < 3; t++) {
            out->temporary[t][i] = random_below(state, 40);
        }
    }
    bind_chain(out, blocks, rates ? 2 : 0);
    out->chain.load_rate *= 2;
}

/* `blocks` blocks with sizes below `bytes`, and times that are quarters of seconds. */
static inline void chain_of(test_chain *c, size_t blocks, uint64_t bytes, uint64_t seed)
{
    uint64_t state = seed + 1;
    memset(c, 0, sizeof *c);
    for (size_t i = 0; i <= blocks; i++) {
        c->activation[i] = (int64_t)next_number(&state, bytes);
        c->gradient[i] = c->activation[i];
    }
    for (size_t i = 0; i < blocks; i++) {
        c->forward[i] = 0.25 * (double)next_number(&state, 40);
        c->backward[i] = 0.25 * (double)next_number(&state, 80);
        c->saved[i] = c->activation[i + 1] + (int64_t)next_number(&state, 3 * bytes);
        for (size_t k = 0; k < 3; k++) {
            c->temporary[k][i] = (int64_t)next_number(&state, bytes / 4 + 1);
        }
    }
    bind_chain(c, blocks, seed % 3 == 0 ? (double)bytes : 0);
}

static inline bool is_near(double a, double b, double tolerance)
{
    return fabs(a - b) <= tolerance * (1 + fabs(a));
}

#endif

/* random_chain: chains of small random numbers, for tests of planners. */
#ifndef MLS_RANDOM_CHAIN_H
#define MLS_RANDOM_CHAIN_H

#include "activation/chain.h"
#include "support/random_bytes.h"

#include <stdbool.h>
#include <stdint.h>

enum { CHAIN_MOST = 64 };

/* Owns its numbers: do not move it once `chain` is set. */
typedef struct random_chain {
    mls_chain chain;
    double forward[CHAIN_MOST], backward[CHAIN_MOST];
    int64_t activation[CHAIN_MOST + 1], gradient[CHAIN_MOST + 1], saved[CHAIN_MOST];
    int64_t temporary[3][CHAIN_MOST];
} random_chain;

static inline int64_t random_below(uint64_t *state, uint64_t bound)
{
    return (int64_t)(random_next(state) % bound);
}

/* Seconds are whole, so that sums are exact. */
static inline void random_chain_fill(random_chain *out, size_t blocks, uint64_t *state,
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
    out->chain = (mls_chain){.blocks = blocks,
                             .forward_seconds = out->forward,
                             .backward_seconds = out->backward,
                             .activation_bytes = out->activation,
                             .gradient_bytes = out->gradient,
                             .saved_bytes = out->saved,
                             .forward_temporary_bytes = out->temporary[0],
                             .saving_temporary_bytes = out->temporary[1],
                             .backward_temporary_bytes = out->temporary[2],
                             .offload_rate = rates ? 2 : 0,
                             .load_rate = rates ? 4 : 0};
}

#endif

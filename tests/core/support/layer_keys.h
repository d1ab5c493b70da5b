/* layer_keys: keys of layers, with a hash of their names. */
#ifndef MLS_LAYER_KEYS_H
#define MLS_LAYER_KEYS_H

#include "activation/layer_map.h"
#include "support/runner.h"

static inline mls_layer_key named(const char *name)
{
    uint64_t hash = 7;
    for (const char *at = name; *at != '\0'; at++) {
        hash = hash * 31 + (unsigned char)*at;
    }
    return (mls_layer_key){.name = {name, strlen(name)}, .hash = hash};
}

#endif

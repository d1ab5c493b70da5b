/* catalog_summary: totals over the shards of a tensor, of an index, and of a layer. */
#ifndef MLS_CATALOG_SUMMARY_H
#define MLS_CATALOG_SUMMARY_H

#include "checkpoint/ranks/merged_index.h"
#include "checkpoint/index/index.h"
#include "checkpoint/storage/shard_layers.h"

#include <stddef.h>
#include <stdint.h>

/* A tensor over all of its shards. */
typedef struct mls_tensor_summary {
    uint64_t bytes;        /* of the shards' elements */
    uint64_t stored_bytes; /* that they take in files */
    uint64_t version;      /* the highest */
    size_t sparse;         /* how many of the shards are sparse */
    const char *codec;     /* of the last place that is compressed; NULL: none is */
} mls_tensor_summary;

mls_tensor_summary mls_tensor_summarize(const mls_catalog *catalog,
                                        const mls_catalog_tensor *tensor);

/* Bytes of the elements of all shards of an index, and those that they take in files. */
typedef struct mls_index_summary {
    uint64_t bytes, stored_bytes;
} mls_index_summary;

mls_index_summary mls_index_summarize(const mls_index *index);

/* Bytes of the shard's elements that a layer holds, and of those that no later layer
 * hides; `item_bytes` is that of one element. */
uint64_t mls_layer_element_bytes(const mls_layer *layer);
uint64_t mls_layer_visible_bytes(const mls_layer *layer, size_t item_bytes);

#endif

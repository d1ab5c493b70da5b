/* roster: what a manifest says of the index of each rank.
 *
 * A manifest is a small document, but for this list: every rank of a large world reads
 * it, to learn from a few numbers for each other rank who has what (holders.h).  So the
 * list is read here, and the rest of the manifest by whoever wants it, without the list.
 */
#ifndef MLS_ROSTER_H
#define MLS_ROSTER_H

#include "status.h"

#include <stddef.h>
#include <stdint.h>

/* Nested arrays and objects in a manifest, at most: what a user noted may be nested, but
 * readers that recurse must be able to read it. */
#define MLS_MANIFEST_DEPTH 128

/* Columns with an entry for each rank. */
typedef struct mls_roster {
    size_t count;
    uint64_t *bytes, *shards, *data_bytes;
    uint32_t *crcs;
    uint32_t *patterns; /* the number of each rank's pattern, or NULL: there are none */
    size_t *part_ends;  /* where each rank's parts end in ... */
    uint64_t *parts;    /* ... this; ranks of one pattern have equally many */
    size_t begin, end;  /* of the list, brackets included, in the text */
} mls_roster;

/* Read the list "indexes" of a manifest, whose "generation" and number of "patterns" it
 * must agree with (docs/format.md).  The whole text is checked as JSON; what else a
 * manifest has is not looked at.  Gives: release with mls_roster_fini.  Takes memory in
 * proportion to the text.
 * MLS_E_FORMAT with the byte offset: the text is not JSON, or nested more than
 * MLS_MANIFEST_DEPTH deep.  MLS_E_VALUE: there is no such list, or something in it is not
 * as it should be.  MLS_E_MEMORY.  `*out` is untouched on failure. */
mls_code mls_roster_read(const char *text, size_t length, mls_roster *out,
                         mls_status *st);

void mls_roster_fini(mls_roster *roster); /* accepts a zeroed one; zeroes it */

#endif

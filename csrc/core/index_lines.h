/* index_lines: indexes that are to the letter what mls_index_build writes.
 *
 * Nearly all are, and such a text need not become JSON values first: each line of it is
 * read for what it says, in a third of the time.  What is checked is what the reader of
 * any JSON checks (index.c).  Whatever is not our own words, be it good or bad, is left
 * to that one, which also knows what is wrong with it and where: nothing is told here.
 */
#ifndef MLS_INDEX_LINES_H
#define MLS_INDEX_LINES_H

#include "index.h"

/* Read a text whose seal was checked; it need not outlive the call.  Gives: release with
 * mls_index_fini.
 * MLS_E_FORMAT, without a word in `st`: it is another text than we would write, or has
 * something besides plain shards with names of ASCII, or is wrong: see what
 * mls_index_parse makes of it.  MLS_E_MEMORY.  `*out` is untouched on failure. */
mls_code mls_index_lines_read(const char *text, size_t length, mls_index *out,
                              mls_status *st);

#endif

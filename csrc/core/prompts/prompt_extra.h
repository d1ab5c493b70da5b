/* prompt_extra: the extras of a prompt, such as digests of its images, and their part in
 * the keys of records.
 *
 * An extra has MLS_PROMPT_EXTRA bytes: its position in the prompt (4), and a digest. The
 * same bytes are stored in the header of the record that has the position.
 */
#ifndef MLS_PROMPT_EXTRA_H
#define MLS_PROMPT_EXTRA_H

#include "prompts/prompt_log.h"

/* Fail with MLS_E_VALUE unless `bytes` bytes at `extras` are extras by position, all
 * below `tokens`. A position may have several. */
mls_code mls_prompt_extras_check(const unsigned char *extras, size_t bytes, size_t tokens,
                                 mls_status *st);

/* Return the extras of the tokens start .. end - 1 of a prompt, borrowed, and set
 * `*count` to their number; NULL if there are none. */
const unsigned char *mls_prompt_extras_between(const mls_prompt_prefix *prefix,
                                               size_t start, size_t end, size_t *count);

/* Continue `hash`, the key of a record of `kind`, with the tokens start .. end - 1 of a
 * prompt and their extras. `id` is the store's. */
void mls_prompt_hash_range(mls_prompt_hash *hash, const unsigned char *id, unsigned kind,
                           const mls_prompt_prefix *prefix, size_t start, size_t end);

#endif

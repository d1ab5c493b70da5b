/* prompt_extra: finds the extras of a range of tokens; hashes both. */
#include "prompts/prompt_extra.h"

#include "base/size.h"

/* Check the length, and each position against the one before it. */
mls_code mls_prompt_extras_check(const unsigned char *extras, size_t bytes, size_t tokens,
                                 mls_status *st)
{
    if (bytes % MLS_PROMPT_EXTRA != 0) {
        return mls_fail(st, MLS_E_VALUE, "extras have %d bytes each, got %zu bytes",
                        MLS_PROMPT_EXTRA, bytes);
    }
    size_t least = 0;
    for (size_t i = 0; i < bytes; i += MLS_PROMPT_EXTRA) {
        const size_t position = mls_load_le32(extras + i);
        if (position < least || position >= tokens) {
            return mls_fail(st, MLS_E_VALUE,
                            "the position of an extra must be at least %zu and less than "
                            "%zu, got %zu",
                            least, tokens, position);
        }
        least = position;
    }
    return MLS_OK;
}

/* Return the number of extras before token `position`: a binary search. */
static size_t count_extras_before(const mls_prompt_prefix *prefix, size_t position)
{
    size_t low = 0, high = prefix->extra_count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (mls_load_le32(prefix->extras + MLS_PROMPT_EXTRA * middle) < position) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

const unsigned char *mls_prompt_extras_between(const mls_prompt_prefix *prefix,
                                               size_t start, size_t end, size_t *count)
{
    const size_t first = count_extras_before(prefix, start);
    *count = count_extras_before(prefix, end) - first;
    return *count == 0 ? NULL : prefix->extras + MLS_PROMPT_EXTRA * first;
}

/* Hash the tokens up to each extra, then its digest, and at last the other tokens. */
void mls_prompt_hash_range(mls_prompt_hash *hash, const unsigned char *id, unsigned kind,
                           const mls_prompt_prefix *prefix, size_t start, size_t end)
{
    size_t count;
    const unsigned char *extra = mls_prompt_extras_between(prefix, start, end, &count);
    for (; count > 0; count--, extra += MLS_PROMPT_EXTRA) {
        const size_t position = mls_load_le32(extra);
        mls_prompt_hash_tokens(hash, prefix->tokens + start, position - start);
        mls_prompt_hash_extra(hash, id, kind, extra + 4);
        start = position;
    }
    mls_prompt_hash_tokens(hash, prefix->tokens + start, end - start);
}

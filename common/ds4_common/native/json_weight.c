/* How much work a JSON text is to decode: its values, those that need an object of their own counting
 * more. Nothing is checked: of a text that is no JSON the weight is any number. */
#include "matmul.h" /* DS4_EXPORT */

/* --- scalar, one pass -------------------------------------------------------------------------- */

enum { PLAIN, QUOTE, LIGHT, HEAVY };
static const uint8_t kinds[256] = {
    ['"'] = QUOTE, [','] = LIGHT, ['['] = HEAVY, ['{'] = HEAVY, [':'] = HEAVY,
};

/* 1 for a comma, `heavy` for the beginning of a list or an object and for a name in one, nothing for
 * what stands in a string. Ends at the first weight above `limit`. */
DS4_EXPORT uint64_t ds4_json_weight(const uint8_t *text, uint64_t n_bytes, uint64_t heavy,
                                    uint64_t limit) {
    uint64_t weight = 0;
    for (uint64_t i = 0; i < n_bytes && weight <= limit; i++) {
        switch (kinds[text[i]]) {
        case LIGHT:
            weight++;
            break;
        case HEAVY:
            weight += heavy;
            break;
        case QUOTE:
            for (i++; i < n_bytes && text[i] != '"'; i++)
                if (text[i] == '\\') i++;
            break;
        default:
            break;
        }
    }
    return weight;
}

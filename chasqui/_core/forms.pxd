# Dates, times and decimals as text, the way isoformat() and str() of Python write them, in both directions. Each
# put gives the end of what it wrote; each read says whether the text has that form, and leaves others to the caller.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

cdef enum:
    MOMENT_CHARS = 32           # the longest: 2026-11-18T03:16:03.000123+00:00
    DATE_CHARS = 10
    SECOND_CHARS = 8            # 03:16:03
    DECIMAL_CHARS = 42          # a sign, 38 digits of which all are behind the point, `0.` before them
    DECIMAL_BYTES = 16
    CHUNK = 1_000_000_000       # as many decimal digits at once as 32 bits take

cdef enum:
    FIRST_DAY = -719_162        # 0001-01-01, from 1970-01-01 on
    LAST_DAY = 2_932_896        # 9999-12-31
    DAY_S = 86_400


# ── Writing ──────────────────────────────────────────────────────────────────────────────────────

cdef inline char* put_digits(char* out, uint32_t number, int count) noexcept nogil:
    cdef int i
    for i in range(count - 1, -1, -1):
        out[i] = <char>(c'0' + number % 10)
        number //= 10
    return out + count


cdef inline char* put_date(char* out, int64_t day) noexcept nogil:
    """The date so many days after 1970-01-01; of the years that Python knows."""
    cdef uint32_t shifted = <uint32_t>(day + 719_468)           # from 0000-03-01 on: a leap day ends its year
    cdef uint32_t era = shifted // 146_097
    cdef uint32_t of_era = shifted % 146_097
    cdef uint32_t year = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    cdef uint32_t of_year = of_era - (365 * year + year // 4 - year // 100)
    cdef uint32_t month = (5 * of_year + 2) // 153              # 0 is March
    cdef uint32_t of_month = of_year - (153 * month + 2) // 5 + 1
    year += 400 * era + (month >= 10)
    out = put_digits(out, year, 4)
    out[0] = c'-'
    out = put_digits(out + 1, month + 3 if month < 10 else month - 9, 2)
    out[0] = c'-'
    return put_digits(out + 1, of_month, 2)


cdef inline char* put_clock(char* out, int64_t us) noexcept nogil:
    """A time of day; microseconds where there are some."""
    cdef uint32_t seconds = <uint32_t>(us // 1_000_000)
    cdef uint32_t rest = <uint32_t>(us % 1_000_000)
    out = put_digits(out, seconds // 3600, 2)
    out[0] = c':'
    out = put_digits(out + 1, seconds // 60 % 60, 2)
    out[0] = c':'
    out = put_digits(out + 1, seconds % 60, 2)
    if rest:
        out[0] = c'.'
        out = put_digits(out + 1, rest, 6)
    return out


cdef inline int64_t day_of(int64_t us) noexcept nogil:
    """The day of a moment, also before 1970."""
    cdef int64_t day_us = <int64_t>DAY_S * 1_000_000
    return us // day_us - (us % day_us < 0)


cdef inline char* put_moment(char* out, int64_t us, bint is_utc) noexcept nogil:
    cdef int64_t day = day_of(us)
    out = put_date(out, day)
    out[0] = c'T'
    out = put_clock(out + 1, us - day * DAY_S * 1_000_000)
    if is_utc:
        memcpy(out, b"+00:00", 6)
        out += 6
    return out


cdef inline char* put_decimal(char* out, const char* value, int scale) noexcept nogil:
    """A decimal of 128 bits, its zeros behind the point kept."""
    cdef uint32_t limbs[4]
    cdef uint8_t digits[45]
    cdef uint64_t left
    cdef uint32_t chunk
    cdef int i, count = 0, last = 3
    cdef bint is_negative
    memcpy(limbs, value, DECIMAL_BYTES)
    is_negative = limbs[3] >> 31
    if is_negative:
        left = 1
        for i in range(4):
            left += <uint32_t>~limbs[i]
            limbs[i] = <uint32_t>left
            left >>= 32
        out[0] = c'-'
        out += 1
    while True:                                 # nine digits at a time, the last ones first
        while last > 0 and limbs[last] == 0:
            last -= 1
        left = 0
        for i in range(last, -1, -1):
            left = left << 32 | limbs[i]
            limbs[i] = <uint32_t>(left // CHUNK)
            left %= CHUNK
        chunk = <uint32_t>left
        for i in range(9):
            digits[count] = chunk % 10
            chunk //= 10
            count += 1
        if last == 0 and limbs[0] == 0 or count == 45:
            break
    while count > scale + 1 and digits[count - 1] == 0:
        count -= 1
    while count <= scale:                       # one digit at least before the point
        digits[count] = 0
        count += 1
    for i in range(count - 1, -1, -1):
        if i == scale - 1:
            out[0] = c'.'
            out += 1
        out[0] = <char>(c'0' + digits[i])
        out += 1
    return out


# ── Reading ──────────────────────────────────────────────────────────────────────────────────────

cdef inline bint read_digits(const char* text, int count, int32_t* number) noexcept nogil:
    cdef int i
    number[0] = 0
    for i in range(count):
        if not c'0' <= text[i] <= c'9':
            return False
        number[0] = number[0] * 10 + (text[i] - c'0')
    return True


cdef inline bint read_date(const char* text, Py_ssize_t size, int64_t* day) noexcept nogil:
    cdef int32_t year, month, of_month, longest, era, of_era
    if size != DATE_CHARS or text[4] != c'-' or text[7] != c'-':
        return False
    if not (read_digits(text, 4, &year) and read_digits(text + 5, 2, &month) and read_digits(text + 8, 2, &of_month)):
        return False
    longest = 31
    if month == 2:
        longest = 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    elif month == 4 or month == 6 or month == 9 or month == 11:
        longest = 30
    if not (year >= 1 and 1 <= month <= 12 and 1 <= of_month <= longest):
        return False
    year -= month <= 2
    era = year // 400
    of_era = year - era * 400
    of_era = of_era * 365 + of_era // 4 - of_era // 100 + (153 * (month - 3 if month > 2 else month + 9) + 2) // 5
    day[0] = era * 146_097 + of_era + of_month - 1 - 719_468
    return True


cdef inline bint read_clock(const char* text, Py_ssize_t size, int64_t* us) noexcept nogil:
    cdef int32_t hour, minute, second, rest = 0
    if size != SECOND_CHARS and size != SECOND_CHARS + 7 or text[2] != c':' or text[5] != c':':
        return False
    if not (read_digits(text, 2, &hour) and read_digits(text + 3, 2, &minute) and read_digits(text + 6, 2, &second)):
        return False
    if size > SECOND_CHARS and (text[SECOND_CHARS] != c'.' or not read_digits(text + SECOND_CHARS + 1, 6, &rest)):
        return False
    if hour > 23 or minute > 59 or second > 59:
        return False
    us[0] = (<int64_t>(hour * 3600 + minute * 60 + second)) * 1_000_000 + rest
    return True


cdef inline bint read_moment(const char* text, Py_ssize_t size, bint is_utc, int64_t* us) noexcept nogil:
    cdef int64_t day, of_day
    if is_utc:
        if size > 6 and text[size - 6] == c'+' and text[size - 5] == c'0' and text[size - 4] == c'0' \
                and text[size - 3] == c':' and text[size - 2] == c'0' and text[size - 1] == c'0':
            size -= 6
        elif size > 1 and text[size - 1] == c'Z':
            size -= 1
        else:
            return False
    if size <= DATE_CHARS or text[DATE_CHARS] != c'T':
        return False
    if not read_date(text, DATE_CHARS, &day):
        return False
    if not read_clock(text + DATE_CHARS + 1, size - DATE_CHARS - 1, &of_day):
        return False
    us[0] = day * DAY_S * 1_000_000 + of_day
    return True


cdef inline bint read_decimal(const char* text, Py_ssize_t size, int precision, int scale, char* value) noexcept nogil:
    """A decimal of at most so many digits, so many of them behind the point, as 128 bits."""
    cdef uint32_t limbs[4]
    cdef uint64_t carry
    cdef Py_ssize_t at = 0
    cdef int i, digits = 0, behind = -1
    cdef uint32_t digit
    cdef bint is_negative = size > 0 and text[0] == c'-'
    memset(limbs, 0, sizeof(limbs))
    at = is_negative
    if at >= size or not c'0' <= text[at] <= c'9':
        return False
    while at < size or behind < scale:
        digit = 0
        if at < size:
            if text[at] == c'.' and behind < 0 and at + 1 < size:
                behind = 0
                at += 1
                continue
            if not c'0' <= text[at] <= c'9':
                return False
            digit = text[at] - c'0'
            at += 1
        elif behind < 0:
            behind = 0
            continue
        if behind >= 0:
            behind += 1
            if behind > scale:
                return False
        digits += digits > 0 or digit > 0       # those before the first that counts do not
        if digits > precision:
            return False
        carry = digit
        for i in range(4):
            carry += <uint64_t>limbs[i] * 10
            limbs[i] = <uint32_t>carry
            carry >>= 32
    if is_negative:
        carry = 1
        for i in range(4):
            carry += <uint32_t>~limbs[i]
            limbs[i] = <uint32_t>carry
            carry >>= 32
    memcpy(value, limbs, DECIMAL_BYTES)
    return True

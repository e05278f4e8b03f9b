// SPDX-License-Identifier: Apache-2.0

package guardstate

import (
	"fmt"
	"strconv"
	"strings"
)

// Limit is a rate in packets per second. 0 is no limit.
type Limit uint64

// MaxLimit is the highest limit, above any rate to one host.
const MaxLimit Limit = 1_000_000_000

var limitUnits = []struct {
	suffix string
	factor uint64
}{{"Gpps", 1e9}, {"Mpps", 1e6}, {"kpps", 1e3}, {"pps", 1}, {"/s", 1}, {"", 1}}

// ParseLimit parses "20kpps", "1.5Mpps", "500pps", "500/s" or "500". A fraction is allowed if the
// result is a whole number of packets per second. It uses integers, because as a floating-point
// number 1.001kpps is less than 1001pps.
func ParseLimit(text string) (Limit, error) {
	for _, u := range limitUnits {
		number, ok := strings.CutSuffix(text, u.suffix)
		if !ok {
			continue
		}
		number = strings.TrimSpace(number)
		whole, fraction, pointed := strings.Cut(strings.TrimPrefix(number, "-"), ".")
		if !digits(whole) || pointed && !digits(fraction) {
			return 0, fmt.Errorf("limit %q: want packets per second, like 500pps, 20kpps or 1.5Mpps", text)
		}
		if strings.HasPrefix(number, "-") {
			return 0, fmt.Errorf("limit %q: a limit below zero: want 1pps to %s, or leave it out for none", text, MaxLimit)
		}
		n, rest, err := scaled(whole, fraction, u.factor)
		switch {
		case err != nil || n > uint64(MaxLimit) || n == uint64(MaxLimit) && rest:
			return 0, fmt.Errorf("limit %q: more than %s, the highest limit: leave it out for none", text, MaxLimit)
		case n == 0 && !rest:
			return 0, fmt.Errorf("limit %q: nothing would pass: want 1pps or more, or leave it out for none", text)
		case n == 0:
			return 0, fmt.Errorf("limit %q: less than a packet per second: the lowest limit is 1pps", text)
		case rest:
			return 0, fmt.Errorf("limit %q: want a whole number of packets per second, like %s", text, Limit(n))
		}
		return Limit(n), nil
	}
	panic("unreachable: the last unit is empty")
}

func digits(s string) bool {
	return s != "" && strings.Trim(s, "0123456789") == ""
}

// scaled returns a decimal number times a power of ten, rounded down, and whether that lost a
// remainder.
func scaled(whole, fraction string, factor uint64) (n uint64, rest bool, err error) {
	places := len(strconv.FormatUint(factor, 10)) - 1
	fraction = strings.TrimRight(fraction, "0")
	if len(fraction) > places {
		fraction, rest = fraction[:places], true
	}
	n, err = strconv.ParseUint(whole+fraction+strings.Repeat("0", places-len(fraction)), 10, 64)
	return n, rest, err
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (l *Limit) UnmarshalText(b []byte) (err error) {
	*l, err = ParseLimit(string(b))
	return err
}

// MarshalText implements encoding.TextMarshaler.
func (l Limit) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// String returns the limit in the largest unit that gives a whole number.
func (l Limit) String() string {
	for _, u := range limitUnits {
		if f := Limit(u.factor); l >= f && l%f == 0 {
			return strconv.FormatUint(uint64(l/f), 10) + u.suffix
		}
	}
	return "no limit"
}

// Set implements pflag.Value.
func (l *Limit) Set(text string) error { return l.UnmarshalText([]byte(text)) }

// Type implements pflag.Value.
func (l *Limit) Type() string { return "limit" }

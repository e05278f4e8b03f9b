// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Limit is a rate of packets per second; 0 is no limit.
type Limit uint64

// MaxLimit is the highest limit. Nothing sends that many packets to one host.
const MaxLimit Limit = 1_000_000_000

var limitUnits = []struct {
	suffix string
	factor float64
}{{"Gpps", 1e9}, {"Mpps", 1e6}, {"kpps", 1e3}, {"pps", 1}, {"/s", 1}, {"", 1}}

// ParseLimit reads "20kpps", "1.5Mpps", "500pps", "500/s" or "500".
func ParseLimit(text string) (Limit, error) {
	for _, u := range limitUnits {
		number, ok := strings.CutSuffix(text, u.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		n *= u.factor
		switch {
		case err != nil || math.IsNaN(n):
			return 0, fmt.Errorf("limit %q: want packets per second, like 500pps, 20kpps or 1.5Mpps", text)
		case n < 1 || n > float64(MaxLimit) || n != math.Trunc(n):
			return 0, fmt.Errorf("limit %q: want a whole number of packets per second, from 1pps to %s", text, MaxLimit)
		}
		return Limit(n), nil
	}
	panic("unreachable: the last unit is empty")
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (l *Limit) UnmarshalText(b []byte) (err error) {
	*l, err = ParseLimit(string(b))
	return err
}

// MarshalText implements encoding.TextMarshaler.
func (l Limit) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// String is the limit with the largest unit in which it is a whole number.
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

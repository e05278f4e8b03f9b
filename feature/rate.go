// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Rate is a number of events per second; 0 means none.
type Rate float64

var rateUnits = map[string]time.Duration{"s": time.Second, "m": time.Minute, "h": time.Hour}

// ParseRate parses "5/s", "30/m", "100/h" or "0".
func ParseRate(text string) (Rate, error) {
	number, unit, ok := strings.Cut(strings.TrimSpace(text), "/")
	n, err := strconv.ParseFloat(number, 64)
	per := rateUnits[unit]
	if number == "0" && !ok {
		return 0, nil
	}
	if err != nil || per == 0 || n < 0 || math.IsNaN(n) || n > 1e6 {
		return 0, fmt.Errorf("rate %q: want a number a second, minute or hour, like 5/s or 30/m, or 0 for none", text)
	}
	return Rate(n / per.Seconds()), nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Rate) UnmarshalText(b []byte) (err error) {
	*r, err = ParseRate(string(b))
	return err
}

// MarshalText implements encoding.TextMarshaler.
func (r Rate) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// String formats the rate for ParseRate.
func (r Rate) String() string {
	if r == 0 {
		return "0"
	}
	for _, u := range []string{"s", "m", "h"} {
		if n := float64(r) * rateUnits[u].Seconds(); n >= 1 || u == "h" {
			return strconv.FormatFloat(math.Round(n*1e6)/1e6, 'f', -1, 64) + "/" + u
		}
	}
	return ""
}

// Set implements pflag.Value.
func (r *Rate) Set(text string) error { return r.UnmarshalText([]byte(text)) }

// Type implements pflag.Value.
func (r *Rate) Type() string { return "rate" }

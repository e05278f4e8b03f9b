// SPDX-License-Identifier: Apache-2.0

package guardstate

import (
	"strings"
	"testing"
)

func TestParseLimit(t *testing.T) {
	for text, want := range map[string]Limit{"1": 1, "500": 500, "500/s": 500, "500pps": 500, "20kpps": 20_000, "1.5Mpps": 1_500_000,
		"1Gpps": MaxLimit, "0.5kpps": 500, "20 kpps": 20_000, "1.5kpps": 1500, "1.001kpps": 1001, "0.001001Mpps": 1001, "0.000000001Gpps": 1,
		"2.0pps": 2, "0.99999999900Gpps": 999_999_999, "007": 7} {
		if got, err := ParseLimit(text); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "pps", "0", "-1", "1.5", "2Gpps", "1e3x", "20 kbps", "NaN", "inf", "20kpps/s",
		"1e3", "0x10", "+5", "1_000", ".5kpps", "5.kpps", "1.2.3kpps", "--1", "1.0000001kpps", "0.5pps", "0.0", "0.0001kpps",
		"1.000000001Gpps", "1000000001", "99999999999999999999kpps", "18446744073709551617", "1,5kpps", "20KPPS"} {
		if got, err := ParseLimit(text); err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("%q: %d, %v; want an error with the text", text, got, err)
		}
	}
}

// TestParseLimitSays checks that each error names the mistake and the remedy.
func TestParseLimitSays(t *testing.T) {
	for text, want := range map[string]string{"0": "leave it out", "0kpps": "leave it out", "-5kpps": "below zero", "0.5pps": "the lowest limit is 1pps",
		"1.5": "like 1pps", "1.2345kpps": "like 1234pps", "2Gpps": "more than 1Gpps", "99999999999999999999": "more than 1Gpps", "20 kbps": "like 500pps, 20kpps"} {
		if _, err := ParseLimit(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want an error with %q", text, err, want)
		}
	}
}

func TestLimitString(t *testing.T) {
	for l, want := range map[Limit]string{1: "1pps", 1500: "1500pps", 20_000: "20kpps", 1_500_000: "1500kpps", 3_000_000: "3Mpps", 0: "no limit"} {
		if got := l.String(); got != want {
			t.Errorf("%d: %q, want %q", uint64(l), got, want)
		}
		if l == 0 {
			continue
		}
		if back, err := ParseLimit(l.String()); err != nil || back != l {
			t.Errorf("%d read back: %d, %v", uint64(l), back, err)
		}
	}
}

// TestLayoutRates checks that the intervals match the limits: within 0.1 % from 1 pps to 10 Mpps.
func TestLayoutRates(t *testing.T) {
	for _, l := range []Limit{1, 3, 100, 999, 20_000, 1_234_567, 10_000_000} {
		g := Limits{Total: l}.Layout()
		rate := ticksPerSecond / float64(g.Interval)
		if off := rate/float64(l) - 1; off < -0.001 || off > 0.001 {
			t.Errorf("%s: an interval of %d ticks is %.2f pps", l, g.Interval, rate)
		}
		if g.Depth < 8*g.Interval {
			t.Errorf("%s: a depth of less than eight packets", l)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"
	"time"
)

func TestConfirmFlag(t *testing.T) {
	for text, want := range map[string]time.Duration{"1s": time.Second, "5m": 5 * time.Minute, "1h1h": 2 * time.Hour, "720h": maxConfirm} {
		var f confirmFlag
		if err := f.Set(text); err != nil || time.Duration(f) != want {
			t.Errorf("%s: %v, %v", text, f.String(), err)
		}
	}
	for _, text := range []string{"", "5", "999ms", "-1s", "721h", "999999h", "10000000000s", "soon"} {
		var f confirmFlag
		if err := f.Set(text); err == nil || err.Error() != "want a time from 1s to 720h, like 90s or 5m" {
			t.Errorf("%s: %v, %v", text, f.String(), err)
		}
	}
}

// moment prints the date with a time more than a day away.
func TestMoment(t *testing.T) {
	from := time.Date(2026, 11, 25, 14, 0, 0, 0, time.UTC)
	for after, want := range map[time.Duration]string{5 * time.Minute: "14:05:00", 12 * time.Hour: "02:00:00", 48 * time.Hour: "2026-11-27 14:00:00"} {
		if got := moment(from.Add(after), from); got != want {
			t.Errorf("%s later: %s, want %s", after, got, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"
	"time"
)

func TestAgo(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for d, want := range map[time.Duration]string{
		0: "0s", 59999 * time.Millisecond: "59s", time.Minute: "1m00s", 61 * time.Second: "1m01s", time.Hour - 1: "59m59s",
		time.Hour: "1h00m", 47*time.Hour + 59*time.Minute: "47h59m", 48 * time.Hour: "2d", 400 * 24 * time.Hour: "400d",
	} {
		if got := Ago(now.Add(-d), now); got != want {
			t.Errorf("%s ago is printed as %q, want %q", d, got, want)
		}
	}
	if got := Ago(time.Time{}, now); got != "-" {
		t.Errorf("never is printed as %q", got)
	}
}

func TestBytes(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 8 << 20: "8.0 MiB", 5 << 40: "5.0 TiB", 1<<64 - 1: "16.0 EiB",
	} {
		if got := Bytes(n); got != want {
			t.Errorf("%d is printed as %q, want %q", n, got, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseSignal(t *testing.T) {
	for _, name := range []string{"QUIT", "SIGQUIT", "quit"} {
		if sig, err := parseSignal(name); err != nil || sig != unix.SIGQUIT {
			t.Errorf("%q: %v, %v", name, sig, err)
		}
	}
	for _, name := range []string{"", "NOPE", "9"} {
		if sig, err := parseSignal(name); err == nil || !strings.Contains(err.Error(), "want a name like TERM") {
			t.Errorf("%q: %v, %v", name, sig, err)
		}
	}
}

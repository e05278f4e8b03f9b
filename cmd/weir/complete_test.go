// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"
)

// Shells complete files only for flags with a path as their value.
func TestFlagValues(t *testing.T) {
	for line, want := range map[string]string{
		"steer run telemetry --slot": ":4\n", "steer move telemetry --bucket": ":4\n", "steer register telemetry --wait": ":4\n", "steer run telemetry --user": ":4\n",
		"steer devices --missing": "tcp\nudp\n:4\n", "bind list --proto": "tcp\nudp\n:4\n", "serve --listen": ":4\n", "apply --confirm": ":4\n",
		"steer register telemetry --pidfile": ":0\n", "status --socket": ":0\n", "apply --file": "yaml\nyml\n:8\n",
	} {
		args := append(append([]string{"__complete", "--root", "/nonexistent"}, strings.Fields(line)...), "")
		if out, errs, status := weir(t, args...); status != 0 || out != want {
			t.Errorf("%s: status %d, %q, want %q\n%s", line, status, out, want, errs)
		}
	}
}

func TestArguments(t *testing.T) {
	for use, want := range map[string][]string{
		"status [SERVICE]":                             {"SERVICE"},
		"explain {udp | tcp} FROM TO":                  {"udp|tcp", "FROM", "TO"},
		"register SERVICE [tcp|udp ADDRESS PORT]":      {"SERVICE", "tcp|udp", "ADDRESS", "PORT"},
		"move SERVICE {--device ADDRESS | --bucket N}": {"SERVICE"},
		"bypass {SERVICE | --all}":                     {"SERVICE|--all"},
		"where ADDRESS|NAME…":                          {"ADDRESS|NAME…"},
		"grant --limit L [--user U] -- COMMAND [ARG…]": nil,
		"send SESSION|SERVICE/MEMBER [TO]":             {"SESSION|SERVICE/MEMBER", "TO"},
	} {
		if got := arguments(use); !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q", use, got, want)
		}
	}
}

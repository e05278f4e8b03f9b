// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"testing"
)

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

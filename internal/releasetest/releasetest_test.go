// SPDX-License-Identifier: Apache-2.0

package releasetest

import (
	"encoding/json"
	"slices"
	"testing"
)

func TestLost(t *testing.T) {
	was := json.RawMessage(`{"a": 1, "b": {"c": ["x", "y"]}, "d": null}`)
	for is, want := range map[string][]string{
		`{"a": 1, "b": {"c": ["x", "y", "z"], "more": 1}, "d": null}`: nil,
		`{"a": 2, "b": {"c": ["x"]}, "d": null}`:                      {".a was 1, and is 2", ".b.c[1] is gone"},
		`{"a": 1, "d": 3}`:                                            {".b is gone", ".d was <nil>, and is 3"},
		`[]`:                                                          {".a is gone", ".b is gone", ".d is gone"},
	} {
		if got := Lost(was, json.RawMessage(is)); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", is, got, want)
		}
	}
	if got := Lost(json.RawMessage(`72623859790382856`), json.RawMessage(`72623859790382857`)); len(got) != 1 {
		t.Errorf("numbers of 64 bits: %q", got)
	}
	if got := LostKeys(was, json.RawMessage(`{"a": 7, "b": {"c": ["z", 2]}, "d": 3}`)); !slices.Equal(got, []string{".b.c[1] was y, and is 2"}) {
		t.Errorf("%q", got)
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"testing"
)

// TestCommitted compares the client's committed images with the objects.
func TestCommitted(t *testing.T) {
	for _, end := range []string{"bpfel", "bpfeb"} {
		want, err := link("../guard_" + end + ".o")
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile("../../../../clients/go/guard/socket_" + end + ".image")
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("clients/go/guard/socket_%s.image differs from the object: run go generate ./feature/guard/bpf", end)
		}
	}
}

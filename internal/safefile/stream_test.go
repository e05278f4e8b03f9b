// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestStream checks that a stream returns the same data and errors as Read.
func TestStream(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	want := bytes.Repeat([]byte("0123456789"), chunk/4) // several chunks, the last one partial
	if err := os.WriteFile(path, want, 0o640); err != nil {
		t.Fatal(err)
	}
	s, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if got, err := io.ReadAll(s); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if n, err := s.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("behind the end: %d, %v", n, err)
	}
	now, err := Stat(path)
	if f, errRead := Read(path, 1<<20); err != nil || errRead != nil || s.Seen != now || f.Mode != s.Mode || f.UID != s.UID || f.Links != s.Links || now.Settled() {
		t.Errorf("%+v, %+v, %+v, %v, %v", s.File, s.Seen, now, err, errRead)
	}
	if err := errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path); !errors.Is(err, ErrRefused) {
		t.Errorf("a FIFO: %v", err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
)

// tail reads a growing file by whole lines.
type tail struct {
	path string
	at   int64  // bytes read
	rest []byte // of an incomplete line
	file *os.File
	buf  []byte
}

// lines calls f with every new line since the last call, and the line's offset. The bytes are valid during
// the call only. A missing file has no lines.
func (t *tail) lines(f func(line []byte, at int64)) error {
	if t.file == nil {
		file, err := os.Open(t.path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		t.file = file
	}
	if t.buf == nil {
		t.buf = make([]byte, 64<<10)
	}
	for {
		n, err := t.file.Read(t.buf)
		t.rest = append(t.rest, t.buf[:n]...)
		t.at += int64(n)
		begin := t.at - int64(len(t.rest))
		for {
			end := bytes.IndexByte(t.rest, '\n')
			if end < 0 {
				break
			}
			f(t.rest[:end], begin)
			t.rest = t.rest[end+1:]
			begin += int64(end) + 1
		}
		if errors.Is(err, io.EOF) || n == 0 {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (t *tail) close() {
	if t.file != nil {
		t.file.Close()
	}
}

// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"errors"
	"os"
)

// chunk is the read size of a Stream in bytes.
const chunk = 256 << 10

// Stream is a file under the rules of [Read], for readers without a copy of the whole file. It is
// not safe for concurrent use.
type Stream struct {
	File // without Data
	Seen Seen

	path string
	f    *os.File
	left []byte // read and not returned yet
	buf  []byte
	err  error // of the last read
	hung bool
}

// Open opens a regular file like [Read]. Its contents are read in chunks, each within two seconds.
func Open(path string) (*Stream, error) {
	return Within(path, func() (*Stream, error) {
		f, st, err := openFile(path)
		if err != nil {
			return nil, err
		}
		return &Stream{File: fileOf(st), Seen: seen(st), path: path, f: f}, nil
	})
}

// Read implements [io.Reader].
func (s *Stream) Read(p []byte) (int, error) {
	if len(s.left) == 0 && s.err == nil {
		s.fill()
	}
	if len(s.left) == 0 {
		return 0, s.err
	}
	n := copy(p, s.left)
	s.left = s.left[n:]
	return n, nil
}

// fill reads a chunk into a buffer unknown to callers, because a hanging read writes to it when it
// returns.
func (s *Stream) fill() {
	if s.buf == nil {
		s.buf = make([]byte, chunk)
	}
	buf := s.buf
	n, err := Within(s.path, func() (int, error) { return s.f.Read(buf) })
	s.hung = errors.Is(err, ErrRefused) // from Within: reads give no such error
	s.left, s.err = buf[:n], err
}

// Close closes the file, after a hanging read has returned.
func (s *Stream) Close() {
	if s.hung {
		go s.f.Close()
		return
	}
	s.f.Close()
}

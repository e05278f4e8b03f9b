// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"fmt"
	"os"
	"regexp"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// PTY is a terminal of a test.
type PTY struct {
	File *os.File // for the program

	t    testing.TB
	mu   sync.Mutex
	text []byte
	seen int
}

// NewPTY opens a terminal of some columns and 24 lines.
func NewPTY(t testing.TB, columns uint16) *PTY {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: 24})
	}
	if err != nil {
		t.Fatal(err)
	}
	p := &PTY{t: t}
	if p.File, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.File.Close() })
	go func() {
		b := make([]byte, 4096)
		for {
			n, err := master.Read(b)
			if err != nil {
				return
			}
			p.mu.Lock()
			p.text = append(p.text, b[:n]...)
			p.mu.Unlock()
		}
	}()
	return p
}

// Text returns all output so far.
func (p *PTY) Text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return string(p.text)
}

// Wait waits for output after the previous match.
func (p *PTY) Wait(want string) {
	p.t.Helper()
	re := regexp.MustCompile(want)
	Eventually(p.t, func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		at := re.FindIndex(p.text[p.seen:])
		if at == nil {
			return fmt.Errorf("%q has no %s", p.text[p.seen:], want)
		}
		p.seen += at[1]
		return nil
	})
}

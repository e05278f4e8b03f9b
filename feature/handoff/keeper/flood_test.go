// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// log is read when the keeper has ended.
type log struct {
	sync.Mutex
	bytes.Buffer
}

func (l *log) Write(b []byte) (int, error) {
	l.Lock()
	defer l.Unlock()
	return l.Buffer.Write(b)
}

func (l *log) lines() int {
	l.Lock()
	defer l.Unlock()
	return strings.Count(l.String(), "\n")
}

// A process that asks for nonsense costs a bounded number of log lines.
func TestFloodOfRefusals(t *testing.T) {
	var l log
	_, socket := run(t, Options{Log: slog.New(slog.NewTextHandler(&l, nil))})
	m := connect(t, socket)
	for i := range 5000 {
		m.say(&wire.Message{Type: wire.Ready, Seq: uint32(i + 1)})
		m.hear(wire.Error)
	}
	for range 200 {
		connect(t, socket).Close()
	}
	if n := l.lines(); n > 60 {
		t.Errorf("%d lines", n)
	}
}

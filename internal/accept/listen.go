// SPDX-License-Identifier: Apache-2.0

// Package accept accepts connections for all of weir's listeners. Strangers can connect to most of
// them. So the package limits the connections of each peer and of all, and closes the oldest idle
// one for a newcomer. Descriptors for the process's own work stay free. No error of accept(2) ends
// a listener.
package accept

import (
	"errors"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/ratelog"
	"github.com/weir-project/weir/internal/sockdiag"
)

// Options are the limits of a listener. Zero values select the defaults.
type Options struct {
	// Name identifies the listener in the log.
	Name string
	// Strangers is the maximum number of connections not admitted. Default: an eighth of
	// RLIMIT_NOFILE minus 64, from 4 to 1,024.
	Strangers int
	// PerPeer is the maximum number of connections of one peer. A peer is an IPv4 address, an IPv6
	// /64, or a user of this host (on a Unix socket or over the loopback interface). Admitted
	// connections count on Unix sockets, not over TCP. Default: half of Strangers, at most 64.
	PerPeer int
	// Handshake is the time limit for admission. Default 5 s.
	Handshake time.Duration
	// Idle is how long an HTTP connection may wait for its next request. Default 60 s.
	Idle time.Duration
	// Write is the time limit for an HTTP request including its answer; 0: no limit. A connection
	// busy for longer than a tenth of it may be closed for a newcomer.
	Write time.Duration
	// Held makes a connection also count until [Conn.Release]. Every caller of Next then calls it
	// once.
	Held bool
	// Once serves one HTTP request per connection.
	Once bool
	Log  *slog.Logger
}

const (
	minStrangers  = 4
	maxStrangers  = 1024
	reserved      = 64 // descriptors for the process's own work
	maxPerPeer    = 64
	defHandshake  = 5 * time.Second
	defIdle       = time.Minute
	shortestPause = 5 * time.Millisecond
	longestPause  = time.Second
)

func (o *Options) setDefaults() {
	if o.Strangers == 0 {
		o.Strangers = strangers()
	}
	if o.PerPeer == 0 {
		o.PerPeer = max(2, min(o.Strangers/2, maxPerPeer))
	}
	if o.Handshake == 0 {
		o.Handshake = defHandshake
	}
	if o.Idle == 0 {
		o.Idle = defIdle
	}
	o.Log = ratelog.Limit(o.Log)
}

// strangers returns an eighth of the process's descriptors beyond reserved.
func strangers() int {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return minStrangers
	}
	return strangerLimit(r.Cur)
}

func strangerLimit(nofile uint64) int {
	return int(max(minStrangers, min((max(nofile, reserved)-reserved)/8, maxStrangers)))
}

// Listener accepts connections within limits. It is a net.Listener with connections of type [Conn].
type Listener struct {
	net.Listener
	o Options

	// Only Next uses these.
	diag   sockdiag.Finder
	enders enders
	spent  time.Duration // spent part of the budget for waits, as of ended
	ended  time.Time

	churners map[Peer]churn

	mu     sync.Mutex
	peers  map[Peer]*peerConns
	count  int // strangers
	serial uint64
}

// New limits the connections of l.
func New(l net.Listener, o Options) *Listener {
	o.setDefaults()
	return &Listener{Listener: l, o: o, peers: map[Peer]*peerConns{}}
}

// Accept implements net.Listener. It fails only for a closed listener.
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.Next()
	if err != nil {
		return nil, err // a nil *Conn is not a nil net.Conn
	}
	return c, nil
}

// Next is Accept with a concrete type.
func (l *Listener) Next() (*Conn, error) {
	wait := Backoff{Name: l.o.Name, Log: l.o.Log}
	for {
		raw, err := l.Listener.Accept()
		switch {
		case err == nil:
			wait.Accepted()
		case errors.Is(err, net.ErrClosed):
			l.diag.Close()
			return nil, err
		default:
			l.failed(err, &wait)
			continue
		}
		peer, err := l.identify(raw)
		if err != nil { // already closed, or from another pid namespace
			l.enders.end(raw)
			continue
		}
		if l.churns(peer, time.Now()) {
			l.enders.end(raw)
			continue
		}
		if c := l.enter(raw, peer); c != nil {
			return c, nil
		}
		l.enders.end(raw)
	}
}

// failed handles an error of accept(2): it closes a stranger's connection, or waits.
func (l *Listener) failed(err error, wait *Backoff) {
	// The descriptor of the evicted connection is free once its reader has released it.
	wait.failed(err, noDescriptors(err) && l.evictOldest())
}

func noDescriptors(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// SPDX-License-Identifier: Apache-2.0

// Package accept takes connections for every listener of weir's. Strangers can
// connect to most of them, so the package bounds the connections of each peer and of
// all, and closes the oldest idle one to let a newcomer in. Descriptors that the
// process needs for its work stay free, and no error of accept(2) ends a listener.
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

// Options bound a listener. Zero values choose the defaults.
type Options struct {
	// Name says in the log which listener it is.
	Name string
	// Strangers is the most connections at a time of peers that are not admitted.
	// Default: an eighth of RLIMIT_NOFILE less 64, from 4 to 1,024.
	Strangers int
	// PerPeer is the most connections at a time of one peer: an IPv4 address, an IPv6
	// /64, or a user of this host, on a Unix socket or over the loopback interface. It
	// counts admitted connections of Unix sockets, and not those of TCP. Default: half of Strangers, at most 64.
	PerPeer int
	// Handshake is the time for a connection to be admitted. Default 5 s.
	Handshake time.Duration
	// Idle is the time that an HTTP connection may wait for its next request. Default 60 s.
	Idle time.Duration
	// Write is the time for an HTTP request, answer included; 0: no limit. A connection
	// that is busy for longer than a tenth of it may be closed to let another in.
	Write time.Duration
	// Held has a connection count until [Conn.Release] is called as well, which every caller of Next then does once.
	Held bool
	// Once answers one HTTP request a connection.
	Once bool
	Log  *slog.Logger
}

const (
	minStrangers  = 4
	maxStrangers  = 1024
	reserved      = 64 // descriptors of a process that does little
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

// strangers is an eighth of the descriptors that the process may have beyond reserved.
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

// Listener accepts within bounds. It is a net.Listener, whose connections are [Conn]s.
type Listener struct {
	net.Listener
	o Options

	// Next alone uses these.
	diag   sockdiag.Finder
	enders enders
	spent  time.Duration // of the budget for waits, at ended
	ended  time.Time

	churners map[Peer]churn

	mu     sync.Mutex
	peers  map[Peer]*peerConns
	count  int // strangers
	serial uint64
}

// New bounds the connections of l.
func New(l net.Listener, o Options) *Listener {
	o.setDefaults()
	return &Listener{Listener: l, o: o, peers: map[Peer]*peerConns{}}
}

// Accept implements net.Listener. Only a closed listener is an error.
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.Next()
	if err != nil {
		return nil, err // a nil *Conn is no nil net.Conn
	}
	return c, nil
}

// Next is Accept with the type of its connections.
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
		if err != nil { // it has gone already, or is of another pid namespace
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

// failed deals with an error of accept(2): a stranger makes room, or the listener waits.
func (l *Listener) failed(err error, wait *Backoff) {
	// The evicted connection's descriptor is free once its reader has let go of it.
	wait.failed(err, noDescriptors(err) && l.evictOldest())
}

func noDescriptors(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

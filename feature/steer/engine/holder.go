// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"os/exec"
	"time"

	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// KeepSocketHolder starts the socket holder of engine sk_reuseport if the engine has services.
func (e *Engine) KeepSocketHolder() error {
	if e.Kind != spec.EngineReuseport || e.Idle() {
		return nil
	}
	return e.StartSocketHolder()
}

// ReconcileMarked reconciles the engine if it is marked.
func (e *Engine) ReconcileMarked() error {
	if marked, err := e.marked(); err != nil || !marked {
		return err
	}
	return e.Reconcile()
}

// The socket holder is a sleeping process with weir's own sockets: the sinks for on_empty: drop, and one socket in
// every group of engine sk_reuseport. No packet waits for it. If it is killed, weir apply and weir serve restart it.
// Until then empty slots with on_empty: drop reject, and the kernel forgets a reuseport group when its last member
// exits.

// SocketHolderCommand returns the command for sockholder.Run: weir itself. Programs that use this package as a
// library set it, or run without a holder.
var SocketHolderCommand func(root, scope string, kind spec.Engine) *exec.Cmd

// StartSocketHolder starts the engine's socket holder if necessary, and waits until its sockets are in place.
func (e *Engine) StartSocketHolder() error {
	if e.socketsHeld() {
		return nil
	}
	if e.Kind == spec.EngineReuseport && e.PokeSocketHolder() {
		if err := e.awaitSocketHolder(e.socketsHeld, nil); err == nil {
			return nil
		}
	}
	return e.spawnSocketHolder(e.socketsHeld)
}

// spawnSocketHolder starts a holder and waits until there returns true.
func (e *Engine) spawnSocketHolder(there func() bool) error {
	if SocketHolderCommand == nil {
		return errors.New("a socket holder is necessary, but engine.SocketHolderCommand is not set: use engine sk_lookup without on_empty: drop")
	}
	cmd := SocketHolderCommand(e.Lock.Path(), e.Scope, e.Kind)
	// A new session and no inherited descriptors: the holder outlives this command.
	cmd.SysProcAttr = users.OwnProgram()
	cmd.Dir = "/"
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start socket holder: %w", err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	return e.awaitSocketHolder(there, exited)
}

// awaitSocketHolder waits up to 10 s until there returns true.
func (e *Engine) awaitSocketHolder(there func() bool, exited <-chan error) error {
	for range 1000 { // the start may take seconds on a busy machine
		if there() {
			return nil
		}
		select {
		case err := <-exited:
			return fmt.Errorf("the socket holder exited: %v: run weir steer hold --scope %s --engine %s to see its error", err, e.Scope, e.Kind)
		case <-time.After(10 * time.Millisecond):
		}
	}
	return errors.New("the socket holder did not open its sockets within 10 s")
}

// socketsHeld reports whether the holder has all its sockets.
func (e *Engine) socketsHeld() bool {
	ok, err := SocketsHeld(e.Pins, e.Kind)
	return ok && err == nil
}

// SocketsHeld reports whether all sockets of the holder are in the engine's maps.
func SocketsHeld(pins *kernel.Opened, kind spec.Engine) (bool, error) {
	if kind == spec.EngineSkLookup {
		return sinksThere(pins), nil
	}
	groups, err := Entries[GroupKey, GroupValue](pins.Maps["groups"])
	if err != nil {
		return false, err
	}
	for k, v := range groups {
		var cookie uint64
		if k.Proto != 0 && v.Leaving == 0 && pins.Maps["holders"].Lookup(v.SocketHolder, &cookie) != nil {
			return false, nil
		}
	}
	return true, nil
}

// SocketHolderProcess identifies a running holder by PID and start time.
type SocketHolderProcess struct {
	PID   uint32
	_     uint32
	Start uint64 // clock ticks since boot
}

// PokeSocketHolder signals the running holder to check its groups. It reports whether one runs.
func (e *Engine) PokeSocketHolder() bool {
	var h SocketHolderProcess
	if e.Pins.Maps["holder"].Lookup(uint32(0), &h) != nil || h.PID == 0 {
		return false
	}
	p, err := pidfd.Open(int(h.PID))
	if err != nil {
		return false
	}
	defer p.Close()
	start, err := pidfd.StartTime(int(h.PID))
	if err != nil || start != h.Start || !p.Alive() {
		return false
	}
	return unix.PidfdSendSignal(p.FD(), unix.SIGHUP, nil, 0) == nil
}

// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/sockfilter"
	"github.com/weir-project/weir/internal/users"
)

// ErrUnsupported is returned if this kernel or user lacks a facility. The exit status of a command is then 3.
var ErrUnsupported = sockfilter.ErrUnsupported

// Need is a kernel facility used by a feature.
type Need struct {
	Name     string       // printed by weir doctor: "sk_lookup programs"
	Since    string       // first kernel version with it: "5.9"
	For      string       // its use in weir
	Optional bool         // the feature works without it, with the loss described in For
	Remedy   string       // remedy if it is missing
	Probe    func() error // returns nil if it is available
}

// NeedError reports a missing need.
type NeedError struct {
	Need Need
	Err  error
}

func (e *NeedError) Error() string {
	if errors.Is(e.Err, os.ErrPermission) {
		return fmt.Sprintf("probe %s (Linux %s): %v", e.Need.Name, e.Need.Since, e.Err) // the kernel may have it
	}
	s := fmt.Sprintf("%s (Linux %s) is missing: %v", e.Need.Name, e.Need.Since, e.Err)
	if r := e.Need.RemedyFor(e.Err); r != "" {
		s += "; " + r
	}
	return s
}

// Lack is the error of a probe with several possible causes. It has the remedy for its own cause.
type Lack struct{ Cause, Remedy string }

func (l *Lack) Error() string { return l.Cause }

// RemedyFor returns the remedy for a probe's error. It is empty for missing permissions: the probe's error names them,
// and another kernel would not help.
func (n Need) RemedyFor(err error) string {
	if errors.Is(err, os.ErrPermission) {
		return ""
	}
	if s := scarce(err); s != "" {
		return s
	}
	if l, ok := errors.AsType[*Lack](err); ok {
		return l.Remedy
	}
	return n.Remedy
}

// scarce returns the remedy for a lack of descriptors or memory; "" for other errors.
func scarce(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "this process has no descriptor left: raise its limit (ulimit -n, LimitNOFILE=)"
	case errors.Is(err, unix.ENFILE):
		return "the host has no descriptor left: raise fs.file-max"
	case errors.Is(err, unix.ENOMEM):
		return "no memory is left: raise the memory limit of its cgroup"
	}
	return ""
}

// Scarce reports whether a probe failed for lack of descriptors or memory. The facility may then exist.
func Scarce(err error) bool { return scarce(err) != "" }

// Unwrap makes errors.Is match ErrUnsupported and the probe's own error.
func (e *NeedError) Unwrap() []error { return []error{ErrUnsupported, e.Err} }

// Check probes a need.
func (n Need) Check() error {
	err := n.Probe()
	switch {
	case err == nil:
		return nil
	case scarce(err) != "":
		return fmt.Errorf("probe %s: %w: %s", n.Name, err, scarce(err)) // it may exist
	}
	return &NeedError{Need: n, Err: err}
}

// Require probes all required needs and returns the missing ones. It stops at a missing permission, because the other
// needs lack it too.
func Require(needs []Need) error {
	var errs []error
	for _, n := range needs {
		if n.Optional {
			continue
		}
		err := n.Check()
		if errors.Is(err, os.ErrPermission) {
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// NetnsCookie distinguishes a namespace from a later one with the same inode number.
var NetnsCookie = Need{Name: "SO_NETNS_COOKIE", Since: "5.14", Optional: true,
	For: "distinguishing a namespace from a later one with its number; without it only by links",
	Probe: func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		_, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		return err
	}}

// ProbeProgram returns a probe of a program type.
func ProbeProgram(t ebpf.ProgramType) func() error {
	return func() error {
		LiftMemlock()
		return ExplainProbe(features.HaveProgramType(t))
	}
}

// ProbeMap returns a probe of a map type.
func ProbeMap(t ebpf.MapType) func() error {
	return func() error {
		LiftMemlock()
		return ExplainProbe(features.HaveMapType(t))
	}
}

// ExplainProbe adds the missing rights to a permission error.
func ExplainProbe(err error) error {
	if errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("%w: %s", os.ErrPermission, users.LackingForBPF()) // the libraries guess other reasons
	}
	return err
}

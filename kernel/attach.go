// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/weir-project/weir/internal/netns"
)

// ErrDetached is returned if a hook does not run the expected link.
var ErrDetached = errors.New("not attached")

// Link is an attachment. It lasts while it is pinned or open.
type Link = link.Link

// Attachment is a hook for one program.
type Attachment interface {
	// String names the hook for plans and errors: "sk_lookup of net:[4026531840]".
	String() string
	// Attach attaches prog. The program stays attached while the link is pinned or open.
	Attach(prog *ebpf.Program) (Link, error)
	// Verify returns ErrDetached if the link attaches no program to this hook.
	Verify(l Link) error
}

// NetnsLookup is the sk_lookup hook of a network namespace (Linux 5.9).
type NetnsLookup struct {
	FD    int    // of the namespace
	Inode uint64 // its inode number
}

func (a NetnsLookup) String() string { return fmt.Sprintf("sk_lookup of net:[%d]", a.Inode) }

// Attach implements Attachment.
func (a NetnsLookup) Attach(prog *ebpf.Program) (Link, error) {
	l, err := link.AttachNetNs(a.FD, prog)
	if err != nil {
		return nil, fmt.Errorf("attach to %s: %w", a, err)
	}
	return l, nil
}

// Verify implements Attachment. The kernel reports inode 0 after the end of the namespace.
func (a NetnsLookup) Verify(l Link) error {
	info, err := l.Info()
	if err != nil {
		return err
	}
	if ns := info.NetNs(); ns == nil || uint64(ns.NetnsInode) != a.Inode {
		return fmt.Errorf("%s: %w", a, ErrDetached)
	}
	return nil
}

// RawTracepoint is a raw tracepoint of the whole host (links since Linux 5.7).
type RawTracepoint struct{ Name string }

func (a RawTracepoint) String() string { return "tracepoint " + a.Name }

// Attach implements Attachment.
func (a RawTracepoint) Attach(prog *ebpf.Program) (Link, error) {
	l, err := link.AttachRawTracepoint(link.RawTracepointOptions{Name: a.Name, Program: prog})
	if err != nil {
		return nil, fmt.Errorf("attach to %s: %w", a, err)
	}
	return l, nil
}

// Verify implements Attachment. A raw tracepoint is attached while its link exists.
func (a RawTracepoint) Verify(l Link) error {
	_, err := l.Info()
	return err
}

// Cgroup is a hook of a version 2 cgroup and its descendants.
type Cgroup struct {
	Path string
	Hook ebpf.AttachType
}

func (a Cgroup) String() string {
	hook := a.Hook.String()
	if a.Hook == ebpf.AttachCGroupInetIngress { // 0, and the library has another name for it
		hook = "ingress"
	}
	return fmt.Sprintf("%s of cgroup %s", hook, a.Path)
}

// Attach implements Attachment. Foreign programs at the same hook stay.
func (a Cgroup) Attach(prog *ebpf.Program) (Link, error) {
	l, err := link.AttachCgroup(link.CgroupOptions{Path: a.Path, Attach: a.Hook, Program: prog})
	if err != nil {
		return nil, fmt.Errorf("attach to %s: %w", a, err)
	}
	return l, nil
}

// Verify implements Attachment. The kernel reports cgroup 0 after the end of the cgroup.
func (a Cgroup) Verify(l Link) error {
	info, err := l.Info()
	if err != nil {
		return err
	}
	if cg := info.Cgroup(); cg == nil || cg.CgroupId == 0 {
		return fmt.Errorf("%s: %w", a, ErrDetached)
	}
	return nil
}

// NetnsGone reports whether the namespace of an instance is gone. Its pins are then unused, and a new namespace may get
// its inode number. An attached sk_lookup link l proves that it exists. A detached or missing link proves nothing. The
// namespace is then gone if nothing leads to it, or if its cookie has changed.
func NetnsGone(l Link, scope string, cookie uint64) bool {
	if l != nil {
		if info, err := l.Info(); err == nil && info.NetNs() != nil && info.NetNs().NetnsInode != 0 {
			return false
		}
	}
	ns, err := netns.OfScope("", scope, cookie)
	if err != nil {
		return errors.Is(err, netns.ErrGone)
	}
	ns.Close()
	return false
}

// SPDX-License-Identifier: Apache-2.0

// Package workload names cgroups: by the systemd unit, the container, or a file of names. A [Table] follows the cgroups
// of a host by events. It keeps the name of a removed cgroup while a reporter still uses it.
package workload

import (
	"regexp"
	"strings"
)

// Kind is the source of a workload's name.
type Kind string

// Kinds, the strongest source first.
const (
	File      Kind = "file"      // a line of the names file
	Container Kind = "container" // a container id in the cgroup's path
	Unit      Kind = "unit"      // a systemd unit in the cgroup's path
	Path      Kind = "path"      // no other source: the path itself
)

// Name is the information in the path of a cgroup.
type Name struct {
	Kind Kind
	// Text is the name: from the file, the first 12 digits of the container's ID, the unit with its suffix, or the path.
	Text      string
	Runtime   string // of a container: docker, podman, containerd, cri-o; empty if unknown
	Container string // full ID, 64 hexadecimal digits
	Pod       string // UID of the Kubernetes pod, with dashes
	Unit      string // innermost systemd unit, also of a container running in one: dnsd.service
}

// scopes maps prefixes of container scopes under systemd to runtimes, as in "docker-ID.scope".
var scopes = map[string]string{
	"docker-":         "docker",
	"libpod-":         "podman",
	"cri-containerd-": "containerd",
	"nerdctl-":        "containerd",
	"crio-":           "cri-o",
}

var (
	containerID = regexp.MustCompile(`^[0-9a-f]{64}$`)
	podScope    = regexp.MustCompile(`^(?:(?:kubelet-)?kubepods(?:-[a-z]+)?-)?pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?$`)
)

// Identify names a cgroup by its path from the root of the hierarchy, as in /proc/PID/cgroup:
// "/system.slice/dnsd.service". A cgroup inside a container or unit belongs to it.
func Identify(path string) Name {
	n := Name{Kind: Path, Text: path}
	before := ""
	for part := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		if id, runtime, ok := container(part, before, n.Pod != ""); ok {
			n.Kind, n.Text, n.Runtime, n.Container = Container, id[:12], runtime, id
			// Docker and podman put scopes, which are units, around their containers.
		} else if m := podScope.FindStringSubmatch(part); m != nil {
			n.Pod = strings.ReplaceAll(m[1], "_", "-")
		} else if unit, ok := unit(part); ok && n.Container == "" {
			n.Unit = unit
			n.Kind, n.Text = Unit, unit
		}
		before = part
	}
	return n
}

// container reads a container ID from one element of a path: a systemd scope, or the bare ID of the cgroupfs driver.
func container(part, before string, inPod bool) (id, runtime string, ok bool) {
	if scope, isScope := strings.CutSuffix(part, ".scope"); isScope {
		for prefix, runtime := range scopes {
			if id, ok := strings.CutPrefix(scope, prefix); ok && containerID.MatchString(id) {
				return id, runtime, true
			}
		}
		return "", "", false
	}
	if id, isPodman := strings.CutPrefix(part, "libpod-"); isPodman && containerID.MatchString(id) {
		return id, "podman", true
	}
	switch {
	case !containerID.MatchString(part):
		return "", "", false
	case before == "docker":
		return part, "docker", true
	case inPod:
		return part, "", true // containerd and cri-o look the same here
	}
	return part, "", true
}

// unit reads the name of a unit with processes. Slices hold only units, and init.scope is systemd itself.
func unit(part string) (string, bool) {
	// systemd prepends an underscore to names that collide with the kernel's own files.
	name := strings.TrimPrefix(part, "_")
	for _, suffix := range []string{".service", ".scope", ".socket", ".mount", ".swap"} {
		if strings.HasSuffix(name, suffix) && len(name) > len(suffix) {
			return name, true
		}
	}
	return "", false
}

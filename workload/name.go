// SPDX-License-Identifier: Apache-2.0

// Package workload names cgroups: by the systemd unit, the container, or a file of names. A [Table] follows the cgroups of a
// host by events. It keeps the name of a removed cgroup for as long as somebody still reports it.
package workload

import (
	"regexp"
	"strings"
)

// Kind says where a workload's name comes from.
type Kind string

// Kinds, the strongest source first.
const (
	File      Kind = "file"      // a line of the names file
	Container Kind = "container" // a container id in the cgroup's path
	Unit      Kind = "unit"      // a systemd unit in the cgroup's path
	Path      Kind = "path"      // nothing known: the path itself
)

// Name is what the path of a cgroup says of it.
type Name struct {
	Kind Kind
	// Text is the name: of the file, the container's id of 12 digits, the unit with its suffix, or the path.
	Text      string
	Runtime   string // of a container: docker, podman, containerd, cri-o; empty if the path does not say
	Container string // the whole id, 64 hexadecimal digits
	Pod       string // uid of the Kubernetes pod, with dashes
	Unit      string // the innermost systemd unit, also of a container that runs in one: dnsd.service
}

// scopes are the prefixes of containers' scopes under systemd, as "docker-ID.scope".
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

// Identify names a cgroup by its path from the root of the hierarchy, as /proc/PID/cgroup has it: "/system.slice/dnsd.service".
// A cgroup inside a container or unit belongs to it.
func Identify(path string) Name {
	n := Name{Kind: Path, Text: path}
	before := ""
	for part := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		if id, runtime, ok := container(part, before, n.Pod != ""); ok {
			n.Kind, n.Text, n.Runtime, n.Container = Container, id[:12], runtime, id
			// Docker and podman put scopes, a unit as any, around their containers.
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

// container reads the id of a container in one element of a path: systemd's scope, or the bare id of the cgroupfs driver.
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
		return part, "", true // containerd and cri-o look alike here
	}
	return part, "", true
}

// unit reads the name of a unit that holds processes. Slices hold units only; init.scope is systemd itself.
func unit(part string) (string, bool) {
	// systemd puts an underscore before names that the kernel has for files of its own.
	name := strings.TrimPrefix(part, "_")
	for _, suffix := range []string{".service", ".scope", ".socket", ".mount", ".swap"} {
		if strings.HasSuffix(name, suffix) && len(name) > len(suffix) {
			return name, true
		}
	}
	return "", false
}

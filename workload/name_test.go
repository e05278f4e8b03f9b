// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const id = "4f2a9c0d1e5b6a7788990011223344556677889900aabbccddeeff0011223344"

func TestIdentify(t *testing.T) {
	const other = "00000000000000000000000000000000000000000000000000000000000000ff"
	pod := "0c1d2e3f-4a5b-6c7d-8e9f-0a1b2c3d4e5f"
	podSlice := strings.ReplaceAll(pod, "-", "_")
	container := func(runtime, pod, unit string) Name {
		return Name{Kind: Container, Text: id[:12], Runtime: runtime, Container: id, Pod: pod, Unit: unit}
	}
	unit := func(u string) Name { return Name{Kind: Unit, Text: u, Unit: u} }
	for path, want := range map[string]Name{
		"/":                               {Kind: Path, Text: "/"},
		"/batch/nightly":                  {Kind: Path, Text: "/batch/nightly"},
		"/system.slice":                   {Kind: Path, Text: "/system.slice"},
		"/system.slice/dnsd.service":      unit("dnsd.service"),
		"/system.slice/dnsd.service/work": unit("dnsd.service"),
		"/system.slice/system-nfacctd.slice/nfacctd@1.service":                   unit("nfacctd@1.service"),
		"/system.slice/_cpu.service":                                             unit("cpu.service"),
		"/user.slice/user-1000.slice/session-3.scope":                            unit("session-3.scope"),
		"/user.slice/user-1000.slice/user@1000.service/app.slice/editor.service": unit("editor.service"),
		"/init.scope":                           unit("init.scope"),
		"/system.slice/.service":                {Kind: Path, Text: "/system.slice/.service"},
		"/docker/" + id:                         container("docker", "", ""),
		"/system.slice/docker-" + id + ".scope": container("docker", "", ""),
		"/system.slice/docker-" + id + ".scope/system.slice/inner.service":                 container("docker", "", ""),
		"/docker/" + other + "/docker/" + id:                                               container("docker", "", ""),
		"/machine.slice/libpod-" + id + ".scope/container":                                 container("podman", "", ""),
		"/libpod_parent/libpod-" + id:                                                      container("podman", "", ""),
		"/machine.slice/libpod-conmon-" + id + ".scope":                                    unit("libpod-conmon-" + id + ".scope"),
		"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" + id + ".scope": container("podman", "", "user@1000.service"),
		"/system.slice/nerdctl-" + id + ".scope":                                           container("containerd", "", ""),
		"/default/" + id:                                                                   container("", "", ""),
		"/kubepods/burstable/pod" + pod + "/" + id:                                         container("", pod, ""),
		"/kubepods/pod" + pod + "/" + id + "/init":                                         container("", pod, ""),
		"/kubepods.slice/kubepods-pod" + podSlice + ".slice/crio-" + id + ".scope":         container("cri-o", pod, ""),
		"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + podSlice + ".slice/cri-containerd-" + id + ".scope":    container("containerd", pod, ""),
		"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable-pod" + podSlice + ".slice/cri-containerd-" + id + ".scope": container("containerd", pod, ""),
		"/system.slice/docker-" + id[:12] + ".scope":             unit("docker-" + id[:12] + ".scope"),
		"/system.slice/other-" + id + ".scope":                   unit("other-" + id + ".scope"),
		"/system.slice/docker-" + strings.ToUpper(id) + ".scope": unit("docker-" + strings.ToUpper(id) + ".scope"),
	} {
		if got := Identify(path); got != want {
			t.Errorf("%s:\n got %+v\nwant %+v", path, got, want)
		}
	}
}

func TestNamesFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "names")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("# jobs\n/batch reports\n/batch/nightly/ nightly # by itself\n\n/system.slice/dnsd.service dns\n")
	n, err := readNames(file)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]Name{
		"/batch":                     {Kind: File, Text: "reports"},
		"/batch/a/b":                 {Kind: File, Text: "reports"},
		"/batch/nightly/1":           {Kind: File, Text: "nightly"},
		"/batches":                   {Kind: Path, Text: "/batches"},
		"/system.slice/dnsd.service": {Kind: File, Text: "dns", Unit: "dnsd.service"},
	} {
		if got := n.identify(path); got != want {
			t.Errorf("%s: got %+v, want %+v", path, got, want)
		}
	}
	for text, want := range map[string]string{
		"/a b\n/c\n":        ":2: 1 words",
		"a b\n":             `:1: path "a"`,
		"/a b\n\n/a/ c\n":   ":3: /a is named twice",
		"/a two names here": ":1: 4 words",
	} {
		write(text)
		if _, err := readNames(file); err == nil || !strings.Contains(err.Error(), file+want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}
